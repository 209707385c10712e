"""Who holds a claim: a process, told apart from a later one with the same number."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """A process on a host; `started` is the kernel's start stamp of that process, with the boot's id."""

    host: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        return cls(platform.node(), os.getpid(), _started(os.getpid()))

    def is_alive(self) -> bool | None:
        """Whether the process still runs; None where it cannot be known (another host)."""
        if self.host != platform.node():
            return None
        return _started(self.pid) == self.started


def _started(pid: int) -> str:
    """Boot id and start time of `pid` in clock ticks since boot; empty where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    # the command name may hold spaces and brackets; the fields after its last bracket are numbers
    fields = stat[stat.rindex(")") + 2 :].split()
    state, start_ticks = fields[0], fields[19]
    return "" if state in "ZX" else f"{boot}/{start_ticks}"
