"""Watching what a trial's processes hold, so that it is ended before the machine runs out."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trimaran.protocol.control_groups import oom_kills, oom_kills_of

_KIB_PER_GIB = 1024 * 1024
_MACHINE = Path("/proc/meminfo")
_VMSTAT = Path("/proc/vmstat")
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


@dataclass(frozen=True)
class Shortage:
    """Why ranks have to be ended for memory, and whether other programs have taken it."""

    sentence: str
    by_others: bool = False


class HeldMemory:
    """What a trial's processes hold, by what the machine had available for them when it began."""

    def __init__(self, process_ids: Iterable[int], limit_gib: float | None) -> None:
        """Note what is available, and what the processes hold of it already, which may be `limit_gib` at most."""
        self._limit_gib = limit_gib
        self._available_gib = _machine_gib()[1] + resident_gib(process_ids)

    def shortage(self, process_ids: Iterable[int]) -> Shortage | None:
        """Where the processes hold more than their limit, or the machine has almost none left.

        Other programs have taken it where the ranks would have left twice what must be left by themselves: as much
        again is for what they hold and is not counted, as page tables. A machine that had less than that when the
        trial began had no room for any layout.
        """
        if not (process_ids := tuple(process_ids)):
            return None
        held, limit = resident_gib(process_ids), self._limit_gib
        if limit is not None and held > limit:
            return Shortage(f"the ranks hold {held:.2f} GiB together, the trial's limit is {limit:.2f} GiB")
        total, free = _machine_gib()
        least = _LEAST_FREE * total
        if free >= least:
            return None
        had = self._available_gib
        left = f"the machine has {free:.2f} of {total:.2f} GiB left, the ranks hold {held:.2f} GiB"
        if 2 * least <= had <= held + 2 * least:
            return Shortage(left)
        return Shortage(
            f"other programs have taken the memory: {left} of {had:.2f} GiB that were available when they began; "
            f"end what else runs here and run the trial again",
            by_others=True,
        )


def kernel_oom_kills() -> int:
    """How many processes the kernel has killed for memory: of this process's control group, which its ranks share.

    Where that is not told, of the whole machine since boot (0 where it does not say either).
    """
    kills = oom_kills()
    return (oom_kills_of(_VMSTAT) or 0) if kills is None else kills


def _machine_gib() -> tuple[float, float]:
    """The machine's memory in GiB, and what is available of it; both infinite where the system does not say."""
    machine: dict[str, int] = {}
    with contextlib.suppress(OSError):
        machine = _fields(_MACHINE)
    if not {"MemTotal", "MemAvailable"} <= machine.keys():
        return math.inf, math.inf
    return machine["MemTotal"] / _KIB_PER_GIB, machine["MemAvailable"] / _KIB_PER_GIB


def _fields(path: Path) -> dict[str, int]:
    """Lines `Name:   123 kB` of a file under /proc."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0])
    return fields
