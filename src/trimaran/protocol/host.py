"""This host, as the operating system describes it: processor, cores and memory that may be used."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from trimaran.protocol.control_groups import cpu_quota, memory_limit_bytes, memory_rooms

GIB = float(1 << 30)


def first_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What Linux says of the first processor, by its own words for it; nothing on another system."""
    try:
        with cpuinfo.open() as lines:
            pairs = [line.partition(":") for line in takewhile(str.strip, lines)]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in pairs}


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or its architecture where it has none.

    Hypervisors may cut it to what it shares with others of its maker, without a number: the family and the model are
    added then.
    """
    first = first_processor(cpuinfo)
    name = first.get("model name", "")
    if name and not any(map(str.isdigit, name)):
        name += "".join(
            f", {word} {first[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in first
        )
    return name or platform.processor() or platform.machine()


def name_until_reboot() -> str:
    """The machine's name, and what tells it from namesakes until it is started again."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{platform.node()}-{boot}"


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity, and the quota of its control groups rounded down."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


def memory_gib() -> float:
    """Memory that this process may use, GiB: the machine's, or the limit of its control groups."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit_bytes()
    return (total if limit is None else min(total, limit)) / GIB


def free_memory_bytes() -> int:
    """Memory that this process may still take: what the machine has left, or a control group that it is in.

    Pages of files that nobody holds count as left, since the kernel gives them up; all of the memory, where the system
    does not say what is left of it.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, IndexError):
        free = _memory_of_machine("MemAvailable")
    return max(0, min([free, *(left for _, left in memory_rooms())]))


def swap_bytes(*, free: bool = False) -> int:
    """How much of the machine's memory may be swapped out, or `free` still be; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return _memory_of_machine("SwapFree" if free else "SwapTotal")
    return 0


def _memory_of_machine(name: str) -> int:
    return int(Path("/proc/meminfo").read_text().partition(f"{name}:")[2].split()[0]) * 1024


# Where other programs take more of the cores' time than this, it shows in the figures.
QUIET_SHARE = 0.1


@dataclass(frozen=True)
class Work:
    """Seconds since boot: `busy_s` that the usable cores worked, summed; `own_s` of this process and all below it.

    Children that have ended count as long as somebody below this process waited for them.
    """

    at_s: float
    cores: int
    busy_s: float
    own_s: float

    @classmethod
    def so_far(cls) -> Work | None:
        """Up to now; None where the system does not say."""
        try:
            lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
            usable = {f"cpu{core}" for core in os.sched_getaffinity(0)}
            cores = [[int(ticks) for ticks in line[1:]] for line in lines if line and line[0] in usable]
            # user, nice, system, idle, waiting for a disk, interrupts, soft interrupts, taken by other guests
            busy = sum(sum(ticks[:3]) + sum(ticks[5:8]) for ticks in cores)
            own = _ticks_below(os.getpid())
        except (AttributeError, OSError, ValueError):
            return None
        second = os.sysconf("SC_CLK_TCK")
        return cls(time.monotonic(), len(cores), busy / second, own / second) if cores else None

    def others_share(self, later: Work) -> float:
        """Share of the cores' time, 0 to 1, that went to other programs between this look and a later one."""
        others = (later.busy_s - self.busy_s) - (later.own_s - self.own_s)
        return min(1.0, max(0.0, others / max(1e-9, self.cores * (later.at_s - self.at_s))))


def _ticks_below(top: int) -> int:
    """Clock ticks that a process, all below it, and those of them that have ended and were waited for, have worked."""
    ticks, children = {}, dict[int, list[int]]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            # the name, in parentheses, may hold anything
            fields = file.read_text(errors="replace").rpartition(")")[2].split()
            process = int(file.parent.name)
            children.setdefault(int(fields[1]), []).append(process)
            ticks[process] = sum(map(int, fields[11:15]))
    total, todo = 0, [top]
    while todo:
        process = todo.pop()
        total += ticks.get(process, 0)
        todo += children.get(process, ())
    return total
