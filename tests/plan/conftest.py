"""What the tests of the planner share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from command import run
from trimaran.cost.grid import Ints
from trimaran.planner.search import search

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def trimaran() -> Run:
    """The command, in a process of its own."""
    return run


@pytest.fixture
def all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans show all that was ranked, layouts too that say nothing beside others."""

    def untold(order: Ints, *_: object) -> Ints:
        return order

    monkeypatch.setattr(search, "telling", untold)
