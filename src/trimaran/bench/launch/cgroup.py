"""A memory limit that the kernel holds over all processes of a trial, where this process may make control groups."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "trimaran-"
_GONE_WITHIN_S = 5.0
_count = itertools.count()


class MemoryGroup:
    """A control group (version 1 or 2) below this process's, with a memory limit for what is put into it."""

    def __init__(self, folder: Path, limit_bytes: int, *, version: int) -> None:
        """Make the group. Raises OSError where that is not allowed."""
        self._folder = folder
        self._events = "memory.events" if version == 2 else "memory.oom_control"
        folder.mkdir()
        try:
            limit = "memory.max" if version == 2 else "memory.limit_in_bytes"
            (folder / limit).write_text(str(limit_bytes))
            for name in ("memory.swap.max",) if version == 2 else ():
                with contextlib.suppress(OSError):
                    (folder / name).write_text("0")  # what swaps neither fails nor tells a true time
            self._kills_before = self._kills()
        except OSError:
            folder.rmdir()
            raise

    @property
    def processes_file(self) -> Path:
        """A process that writes `0` here becomes one of the group."""
        return self._folder / "cgroup.procs"

    def over_memory(self) -> bool:
        """Whether the kernel has ended a process of the group for the limit."""
        return self._kills() > self._kills_before

    def close(self) -> None:
        """End every process of the group, however far it strayed from its rank, and remove the group."""
        deadline = time.monotonic() + _GONE_WITHIN_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                for pid in self.processes_file.read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            try:
                self._folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.01)
            else:
                return

    def _kills(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            for line in (self._folder / self._events).read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0


def memory_group(limit_gib: float | None) -> MemoryGroup | None:
    """A group that may hold `limit_gib` GiB; None where there is no limit or no right to make one."""
    if limit_gib is None:
        return None
    for version, parent in _parents():
        _remove_left_over(parent)
        name = f"{_PREFIX}{os.getpid()}-{next(_count)}"
        with contextlib.suppress(OSError):
            return MemoryGroup(parent / name, int(limit_gib * 2**30), version=version)
    return None


def _parents() -> list[tuple[int, Path]]:
    """The groups of this process that may hold a memory limit: (version, folder)."""
    groups = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                groups.append((1, _ROOT / "memory" / path.lstrip("/")))
            elif not controllers:
                groups.append((2, _ROOT / path.lstrip("/")))
    return [(version, folder) for version, folder in groups if _can_limit(version, folder)]


def _can_limit(version: int, folder: Path) -> bool:
    if version == 1:
        return os.access(folder, os.W_OK)
    with contextlib.suppress(OSError):
        return os.access(folder, os.W_OK) and "memory" in (folder / "cgroup.subtree_control").read_text().split()
    return False


def _remove_left_over(parent: Path) -> None:
    """Groups of harnesses that were killed; that of a living one may be empty because its ranks are still to come."""
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{_PREFIX}*"):
            owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
            if not Path("/proc", owner).exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
