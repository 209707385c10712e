"""What the tests of the planner share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from command import run

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def trimaran() -> Run:
    """The command, in a process of its own."""
    return run
