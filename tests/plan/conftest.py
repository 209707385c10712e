"""What the tests of the planner share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def trimaran() -> Run:
    """The real command, in a process of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trimaran", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    return run
