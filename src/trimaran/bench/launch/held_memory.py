"""Watching what a trial's processes hold, so that it is ended before the machine runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

_KIB_PER_GIB = 1024 * 1024
# Below this share of the machine's memory left, the kernel may kill anything, the sweep included.
_LEAST_FREE = 0.02


def resident_gib(process_ids: Iterable[int]) -> float:
    """Memory in GiB that the processes hold: anonymous and shared pages, mapped files left out."""
    kib = 0
    for pid in process_ids:
        with contextlib.suppress(OSError):
            fields = _fields(Path(f"/proc/{pid}/status"))
            kib += fields.get("RssAnon", 0) + fields.get("RssShmem", 0)
    return kib / _KIB_PER_GIB


def memory_exceeded(process_ids: Iterable[int], limit_gib: float | None) -> str | None:
    """A sentence where the processes hold more than `limit_gib`, or leave the machine almost none."""
    if not (process_ids := tuple(process_ids)):
        return None
    held = resident_gib(process_ids)
    if limit_gib is not None and held > limit_gib:
        return f"the ranks hold {held:.2f} GiB together, the trial's limit is {limit_gib:.2f} GiB"
    with contextlib.suppress(OSError):
        machine = _fields(Path("/proc/meminfo"))
        total, free = machine.get("MemTotal", 0), machine.get("MemAvailable", 0)
        if free < _LEAST_FREE * total:
            return (
                f"the machine has {free / _KIB_PER_GIB:.2f} of {total / _KIB_PER_GIB:.2f} GiB left, "
                f"the ranks hold {held:.2f} GiB"
            )
    return None


def kernel_oom_kills() -> int:
    """How many processes the kernel has killed for memory since boot (0 where it does not say)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _fields(path: Path) -> dict[str, int]:
    """Lines `Name:   123 kB` of a file under /proc."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0])
    return fields
