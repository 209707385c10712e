"""A file system of its own with little room, for tests of disks that fill up or may not be written."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """The folder as a file system of that size (`64k`, `24m`), in memory, while the block runs."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        if os.geteuid() == 0:
            pytest.fail("no disk can be mounted here: run in a container that may mount (--cap-add SYS_ADMIN)")
        pytest.skip("a disk can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
