"""The control groups (version 1 or 2) that this process is in, and what the kernel says of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
# By version: files of the limit and of what is held, and how names in memory.stat begin where groups below count too.
_MEMORY = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def own_groups(controller: str) -> list[tuple[int, Path]]:
    """The groups of this process in which the kernel may hold it to limits of a controller: (version, folder)."""
    groups = []
    with contextlib.suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _number, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                groups.append((1, _ROOT / controller / path.lstrip("/")))
            elif not controllers:
                groups.append((2, _ROOT / path.lstrip("/")))
    return groups


def limiting_groups(controller: str) -> Iterator[tuple[int, Path]]:
    """As `own_groups`, each followed by those above it, up to the root: the limits of all of them hold.

    A container without a namespace of its own for groups is told a path of its host's, of which it sees the root alone.
    """
    for version, group in own_groups(controller):
        for folder in (group, *group.parents):
            if folder.is_relative_to(_ROOT):
                yield version, folder


def cpu_quota() -> float | None:
    """The cores' worth of time that this process's groups get at most; None without a limit."""
    quotas = []
    for version, folder in limiting_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # a group without a limit says max, or -1
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


def memory_limit_bytes() -> int | None:
    """What this process's groups may hold at most; None without a limit."""
    limits = []
    for version, folder in limiting_groups("memory"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((folder / _MEMORY[version][0]).read_text()))
    return min(limits, default=None)


def memory_rooms() -> Iterator[tuple[int, int]]:
    """Bytes that each group with a limit may hold, and may still take.

    Pages of files that nobody holds count as left, and what the kernel keeps of their names where it says (version 2).
    """
    for version, folder in limiting_groups("memory"):
        limit, held, prefix = _MEMORY[version]
        with contextlib.suppress(OSError, ValueError):
            most = int((folder / limit).read_text())
            left = most - int((folder / held).read_text())
            words = (entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
            of_files = (f"{prefix}inactive_file", f"{prefix}active_file", "slab_reclaimable")
            yield most, left + sum(int(size) for name, size in words if name in of_files)


def oom_kills() -> int | None:
    """How many processes of this process's group the kernel has killed for memory; None where it does not say.

    `oom_kill` counts those of the group and, in version 2, below it, whatever limit was met
    (Documentation/admin-guide/cgroup-v2.rst, memory.events).
    """
    for version, folder in own_groups("memory"):
        kills = oom_kills_of(folder / ("memory.events" if version == 2 else "memory.oom_control"))
        if kills is not None:
            return kills
    return None


def oom_kills_of(events: Path) -> int | None:
    """`oom_kill` of a file of the kernel's; None where it is not there or does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in events.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
