"""What becomes of a call of the command line: measured, and killed where it hangs."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from command import commands

# What a person waits for. Nothing is taken off for the modules that a fresh process has to read, since other tests make
# the machine slower.
MOST_CPU_S = 4.0
MOST_GIB = 0.5
# Processor time tells how much work a try makes, wall time how busy the machine is. What waits for ever makes no work.
HANG_S = 60.0


@dataclass(frozen=True)
class Try:
    """Arguments of the command line, of which something is wrong, or nothing."""

    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What a try ended in: exit status (None: killed as a hang), all that it printed, processor time, memory."""

    status: int | None
    output: str
    cpu_s: float
    peak_gib: float

    def complaint(self, tried: Try) -> str | None:
        """What is wrong with the answer, or None."""
        lines = self.output.strip().splitlines()
        reasons = [
            ("a hang", self.status is None),
            ("a traceback", "Traceback" in self.output),
            (f"status {self.status}", self.status not in (None, 0, 2)),
            (f"{len(lines)} lines", self.status != 0 and len(lines) > 3),
            ("a long line", self.status != 0 and any(len(line) > 2000 for line in lines)),
            ("control characters", any(not c.isprintable() and c not in "\n\t" for c in self.output)),
            (f"{self.cpu_s:.2f} s", self.cpu_s > MOST_CPU_S),
            (f"{self.peak_gib:.2f} GiB", self.peak_gib > MOST_GIB),
            ("no word", self.status != 0 and not lines),
        ]
        found = ", ".join(reason for reason, wrong in reasons if wrong)
        shown = [argument[:200] for argument in tried.arguments]
        return f"{found}: trimaran {shown}\n{self.output[-1500:]}" if found else None


@contextmanager
def taken_port() -> Iterator[int]:
    """A port that is in use, so that what would serve on it ends."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def answer(tried: Try, folder: Path) -> Answer:
    """Run the command in a process of its own, and kill it where it hangs."""
    try:
        ended = commands().call(tried.arguments, folder, HANG_S)
    except subprocess.TimeoutExpired:
        return Answer(None, "", HANG_S, 0.0)
    return Answer(ended.status, ended.out + ended.err, ended.cpu_s, ended.peak_gib)
