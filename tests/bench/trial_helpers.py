"""What the tests of trials share: the worker that misbehaves, limits that suit it, a look for what is left."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trimaran.bench.watch.limits import Limits

FAKE = Path(__file__).with_name("fake_worker.py")
LIMITS = Limits(timeout_s=60, start_s=30, hang_s=3.0, peers_s=0.3)


def fake_worker(behaviour: str) -> tuple[str, ...]:
    """Command of a rank that behaves so."""
    return (sys.executable, str(FAKE), behaviour)


def processes_that_name(text: str) -> list[str]:
    """Command lines, and folders, of other processes that hold `text`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            command += f"in {(file.parent / 'cwd').readlink()}"
        except OSError:
            continue
        if text in command and file.parent.name != str(os.getpid()):
            found.append(command)
    return found
