"""Limits of memory and of CPU time that the kernel holds, where this process may make control groups."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from trimaran.protocol.control_groups import oom_kills_of, own_groups

_PREFIX = "trimaran-"
_GONE_WITHIN_S = 5.0
_count = itertools.count()
# The least time that is handed out at once without many more switches of processes than work: quotas of 1 ms give 0.35
# of a core where 0.5 are asked for, of 2 ms 0.44 and of 5 ms 0.5, but what waited then runs 10 ms at full speed.
_QUOTA_US = 2000
# What is written into which file of a group.
Limits = Sequence[tuple[str, object]]
Group = TypeVar("Group", bound="ControlGroup")


class ControlGroup:
    """A control group (version 1 or 2) below one of this process's, with limits for what is put into it."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        """Make the group and set its limits, by their files. Raises OSError where that is not allowed."""
        self._folder = folder
        folder.mkdir()
        try:
            self.limit(limits)
        except OSError:
            folder.rmdir()
            raise

    def limit(self, limits: Limits) -> None:
        """Set limits, in their order."""
        for name, value in limits:
            (self._folder / name).write_text(str(value))

    @property
    def processes_file(self) -> Path:
        """A process that writes `0` here becomes one of the group."""
        return self._folder / "cgroup.procs"

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


class MemoryGroup(ControlGroup):
    """A group whose processes may hold so many bytes together."""

    def __init__(self, folder: Path, limit_bytes: int, *, version: int) -> None:
        """Make the group. Raises OSError where that is not allowed."""
        self._events = "memory.events" if version == 2 else "memory.oom_control"
        super().__init__(folder, [("memory.max" if version == 2 else "memory.limit_in_bytes", limit_bytes)])
        if version == 2:
            with contextlib.suppress(OSError):
                self.limit([("memory.swap.max", 0)])  # what swaps neither fails nor tells a true time
        self._kills_before = self._kills()

    def over_memory(self) -> bool:
        """Whether the kernel has ended a process of the group for the limit."""
        return self._kills() > self._kills_before

    def _kills(self) -> int:
        return oom_kills_of(self._folder / self._events) or 0


class SpeedGroup(ControlGroup):
    """A group whose processes get the time of so many cores at most.

    The kernel hands a quota out anew in every period, and what was not used is lost. So a process that waited may use
    one quota at once, which is why it is short: a burst of work is as slow as a long one.
    """

    def __init__(self, folder: Path, cores: float, *, version: int) -> None:
        """Make the group. Raises OSError where that is not allowed."""
        self._version = version
        super().__init__(folder, self._quota(cores))

    def go_first(self) -> None:
        """Have its processes go before all others, as far as the quota goes."""
        self.limit([("cpu.weight", 10_000) if self._version == 2 else ("cpu.shares", 262_144)])

    def _quota(self, cores: float) -> Limits:
        period_us = round(_QUOTA_US / min(cores, 1.0))
        quota_us = round(period_us * cores)
        if self._version == 2:
            return [("cpu.max", f"{quota_us} {period_us}")]
        # a quota of -1 lifts the limit, so that the period may change
        return [("cpu.cfs_quota_us", -1), ("cpu.cfs_period_us", period_us), ("cpu.cfs_quota_us", quota_us)]


def memory_group(limit_gib: float | None) -> MemoryGroup | None:
    """A group that may hold `limit_gib` GiB; None where there is no limit or no right to make one."""
    if limit_gib is None:
        return None
    return _made("memory", lambda folder, version: MemoryGroup(folder, int(limit_gib * 2**30), version=version))


def speed_group(cores: float) -> SpeedGroup | None:
    """A group that gets the time of `cores` cores at most; None where there is no right to make one.

    Under version 2 a process has one group, so that it leaves the one of `memory_group`.
    """
    return _made("cpu", lambda folder, version: SpeedGroup(folder, cores, version=version))


def _made(controller: str, make: Callable[[Path, int], Group]) -> Group | None:
    for version, parent in _parents(controller):
        _remove_left_over(parent)
        with contextlib.suppress(OSError):
            return make(parent / f"{_PREFIX}{os.getpid()}-{next(_count)}", version)
    return None


def _parents(controller: str) -> list[tuple[int, Path]]:
    """The groups of this process below which the controller can limit others: (version, folder)."""
    return [(version, folder) for version, folder in own_groups(controller) if _can_limit(version, folder, controller)]


def _can_limit(version: int, folder: Path, controller: str) -> bool:
    if version == 1:
        return os.access(folder, os.W_OK)
    with contextlib.suppress(OSError):
        return os.access(folder, os.W_OK) and controller in (folder / "cgroup.subtree_control").read_text().split()
    return False


def _remove_left_over(parent: Path) -> None:
    """Groups of harnesses that were killed; that of a living one may be empty because its ranks are still to come."""
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{_PREFIX}*"):
            owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
            if not Path("/proc", owner).exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
