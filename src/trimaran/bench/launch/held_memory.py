"""Watching what a trial's processes hold, so that it is ended before the machine runs out."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trimaran.protocol.control_groups import memory_rooms, oom_kills, oom_kills_of

_KIB_PER_GIB, _BYTES_PER_GIB = 1024 * 1024, 2.0**30
_MACHINE = Path("/proc/meminfo")
_VMSTAT = Path("/proc/vmstat")
# Below this share of the memory left, of the machine's or a control group's, the kernel may kill anything there, the
# sweep included: under memory.oom.group, as Kubernetes sets it, it ends all of a container at once.
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


@dataclass(frozen=True)
class _Room:
    """GiB of memory in all, and available, by whose word."""

    name: str
    total_gib: float
    free_gib: float


class HeldMemory:
    """What a trial's processes hold, by what the machine had available for them when it began."""

    def __init__(self, process_ids: Iterable[int], limit_gib: float | None) -> None:
        """Note what is available, and what the processes hold of it already, which may be `limit_gib` at most."""
        self._limit_gib = limit_gib
        resident = resident_gib(process_ids)
        self._available_gib = [room.free_gib + resident for room in _rooms()]

    def shortage(self, process_ids: Iterable[int]) -> Shortage | None:
        """Where the processes hold more than their limit, or the machine or a control group has almost none left.

        Other programs have taken it where the ranks would have left twice what must be left by themselves: as much
        again is for what they hold and is not counted, as page tables. A machine that had less than that when the
        trial began had no room for any layout.
        """
        if not (process_ids := tuple(process_ids)):
            return None
        held, limit = resident_gib(process_ids), self._limit_gib
        if limit is not None and held > limit:
            return Shortage(f"the ranks hold {held:.2f} GiB together, the trial's limit is {limit:.2f} GiB")
        for room, had in zip(_rooms(), self._available_gib, strict=False):
            least = _LEAST_FREE * room.total_gib
            if room.free_gib >= least:
                continue
            left = (
                f"{room.name} has {room.free_gib:.2f} of {room.total_gib:.2f} GiB left, the ranks hold {held:.2f} GiB"
            )
            if 2 * least <= had <= held + 2 * least:
                return Shortage(left)
            return Shortage(
                f"other programs have taken the memory: {left} of {had:.2f} GiB that were available when they began; "
                f"end what else runs here and run the trial again",
                by_others=True,
            )
        return None


def kernel_oom_kills() -> int:
    """How many processes the kernel has killed for memory: of this process's control group, which its ranks share.

    Where that is not told, of the whole machine since boot (0 where it does not say either).
    """
    kills = oom_kills()
    return (oom_kills_of(_VMSTAT) or 0) if kills is None else kills


def _rooms() -> Iterator[_Room]:
    """The machine's memory, infinite where the system does not say, and that of each control group with a limit."""
    total, available = _machine_gib()
    yield _Room("the machine", total, available)
    for most, left in memory_rooms():
        group = "the control group of this process, as of a container or a job,"
        yield _Room(group, most / _BYTES_PER_GIB, left / _BYTES_PER_GIB)


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
