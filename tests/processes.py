"""Processes of this machine by where they work, and what starts one that permissions bind."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest


def bound_by_permissions() -> tuple[str, ...]:
    """A command that starts another as a user whom the permissions of files bind, as they do not bind root."""
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root needs setpriv to be bound by permissions")
    return ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all")


def processes_in(folder: Path) -> list[Path]:
    """What /proc holds of the processes that work in `folder` or below it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(folder):
                found.append(process)
    return found


def rank_of(process: Path) -> int | None:
    """A rank's number, by the file that its stderr goes to; None of a process that is none, begins or has ended."""
    try:
        opened = {link.readlink().name for link in (process / "fd").iterdir()}
    except OSError:
        return None
    return next((int(name.removeprefix("stderr.")) for name in opened if name.startswith("stderr.")), None)
