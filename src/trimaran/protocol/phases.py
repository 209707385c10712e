"""Phases of a rank, and how it tells in which one it is: its heartbeat file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path


class RankPhase(StrEnum):
    """What a rank does, in this order, from its start-up to its steps; between two steps it may go back to `RESUME`.

    All ranks leave `BUILD`, `RESUME` and `PROFILE`, in which one writes down what it has profiled, together.
    """

    IMPORT_TORCH = "import_torch"
    CONNECT = "connect"
    BUILD = "build"
    RESUME = "resume"
    STEP = "step"
    PROFILE = "profile"


_WIDTH = max(map(len, RankPhase))


class Heartbeat:
    """A rank's signs of life: the file names the phase that it is in, and its time is that of the newest sign."""

    def __init__(self, file: Path) -> None:
        self.seconds: dict[str, float] = {}
        self._file = file

    @contextmanager
    def during(self, phase: RankPhase) -> Iterator[None]:
        """Enter `phase` and keep the seconds that the block takes."""
        self.enter(phase)
        begin = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - begin

    def enter(self, phase: RankPhase) -> None:
        """Tell that a phase begins, which is a sign of life too."""
        # over what is there: on a full disk a file that was emptied would stay so
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, phase.ljust(_WIDTH).encode())
        finally:
            os.close(descriptor)

    @contextmanager
    def between_steps(self, phase: RankPhase) -> Iterator[None]:
        """Be in another phase than that of steps while the block runs."""
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(RankPhase.STEP)

    def beat(self) -> None:
        """Give a sign of life."""
        os.utime(self._file)
