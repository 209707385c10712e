"""Remedy: what stands in SQLite's way, and the way out, in words."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def remedy(path: Path, error: sqlite3.Error, waited_s: float) -> str:
    """What an error of the store at a path, for whose lock so many seconds were waited, comes from and what helps."""
    if occupied := _occupied(path):
        return occupied
    message = str(error)
    if "full" in message or "disk I/O" in message:
        return f"the disk is full or failing ({message}); rows stored before are kept: free space and run again"
    if "locked" in message or "locking" in message:
        # SQLite does not tell a lock that is held from one that a file system does not give
        return (
            f"it was locked for {waited_s:.0f} s ({message}): end the process that holds it, or use a file on "
            f"another file system where this one keeps no locks"
        )
    if "readonly" in message or "unable to open" in message:
        return f"it cannot be written ({message}): check its permissions, or name another file"
    if "not a database" in message:
        return (
            f"it is not a store, or damaged ({message}): name one that bench, tune or import wrote, as "
            f"runs/NAME/store.sqlite; the name of a table ends in .csv"
        )
    if "malformed" in message:
        return f"it is damaged ({message}): move it away, or name another file"
    return message


def _occupied(path: Path) -> str:
    """Which of the files that SQLite keeps beside a store something else has the name of; empty where none."""
    beside = (path.with_name(f"{path.name}-{ending}") for ending in ("wal", "shm", "journal"))
    taken = next((file for file in beside if file.exists() and not file.is_file()), None)
    return "" if taken is None else f"SQLite keeps a file {taken.name} beside it, and {taken} is none: move that away"
