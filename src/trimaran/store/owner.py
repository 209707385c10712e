"""Who holds a claim: a process, told apart from a later one with the same number."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Self

from pydantic import BaseModel


class Owner(BaseModel):
    """A process on a host. `started` is the kernel's start stamp of that process, with the boot's id.

    `namespace` is that of its process number: containers of one machine, which may well share a host name, number
    their processes each by itself.
    """

    host: str
    namespace: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> Self:
        """This process."""
        return cls(host=platform.node(), namespace=_namespace(), pid=os.getpid(), started=_started(os.getpid()))

    def is_alive(self) -> bool | None:
        """Whether the process still runs.

        None where its number says nothing here (another machine or namespace), and of another user's process that
        this one may not see, as under hidepid of proc(5).
        """
        if self.namespace != _namespace():
            return None
        try:
            started = _started(self.pid)
        except OSError:
            return None
        return None if not started and _is_hidden(self.pid) else started == self.started

    def is_stopped(self) -> bool:
        """Whether the process is known to live and stands still until it is told to go on, as after Ctrl-Z."""
        return self.is_alive() is True and _stat(self.pid)[:1] == ["T"]


def waiting_for(owner: Owner, doing: str) -> str:
    """What to tell who waits for a process that is `doing` something."""
    way_on = "; it is stopped: continue it with fg, or end it" if owner.is_stopped() else ""
    return f"process {owner.pid} on {owner.host} {doing}; waiting{way_on}"


def this_boot() -> str:
    """The id of this machine's boot, the same in all its containers; its host name where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _namespace() -> str:
    try:
        return f"{this_boot()}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return this_boot()


def _started(pid: int) -> str:
    """Boot id and start time of `pid` in clock ticks since boot; empty where there is no such process."""
    stat = _stat(pid)
    return "" if not stat or stat[0] in "ZX" else f"{this_boot()}/{stat[19]}"


def _is_hidden(pid: int) -> bool:
    """Whether `pid`, of which nothing is seen, is there all the same: the kernel refuses a signal to it."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _stat(pid: int) -> list[str]:
    """What the kernel says of `pid`, from its state on (proc(5)); empty where no such process is seen.

    Raises OSError where it does not say.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    # the command name may hold spaces and brackets; the fields after its last bracket are words and numbers
    return stat[stat.rindex(")") + 2 :].split()
