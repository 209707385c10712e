"""This host, as the operating system describes it: processor, cores and memory that may be used."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

GIB = float(1 << 30)
_CGROUP = Path("/sys/fs/cgroup")


def processor_name() -> str:
    """The processor's name, or its architecture where it has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity, and a container's quota rounded down."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def memory_gib() -> float:
    """Memory that this process may use, GiB: the machine's, or a container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup version 2, version 1
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int((_CGROUP / name).read_text()))
    return total / GIB
