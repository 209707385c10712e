"""Telling a hang from slowness: the pulse of every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trimaran.bench.watch.limits import Limits
from trimaran.protocol.files import RunFile
from trimaran.protocol.phases import RankPhase

# Phases at whose end ranks wait for each other.
_LEFT_TOGETHER = (RankPhase.BUILD, RankPhase.RESUME, RankPhase.PROFILE)


@dataclass(frozen=True)
class Silence:
    """A rank that has been silent too long, and the sentence that says so."""

    rank: int
    sentence: str


class Pulse:
    """Watches the heartbeats of a run's ranks and the lines of its log.

    A rank names each phase of its start-up in its heartbeat file, and the last when steps begin; afterwards it sets
    the file's time, several times a step, and with all that it reads of a checkpoint.

    Ages are measured on this process's monotonic clock from the moment a change was seen, so
    that neither a clock that is set nor a laptop that sleeps looks like a hang.
    """

    def __init__(self, out_dir: Path, ranks: int) -> None:
        self._out_dir = out_dir
        self._started = time.monotonic()
        self._stamps: list[int] = [0] * ranks
        self._seen_at = [self._started] * ranks
        self._in_step = [False] * ranks
        self._phase = [""] * ranks
        self._start_up_s = 0.0
        self._longest_gap_s = 0.0
        self._first_step_s = 0.0
        self._log_offset = 0
        self._made_steps = 0
        self.steps = 0

    def observe(self) -> None:
        """Look at the files once."""
        self._count_steps()
        now = time.monotonic()
        if self._made_steps and not self._first_step_s:
            self._first_step_s = now - self._started
        for rank in range(len(self._stamps)):
            sign = _sign_of_life(RunFile.HEARTBEAT.of(self._out_dir, rank))
            if sign is None or sign == (self._stamps[rank], self._phase[rank]):
                continue
            before, (stamp, phase) = self._phase[rank], sign
            if phase == RankPhase.STEP and before != RankPhase.STEP:
                self._start_up_s = max(self._start_up_s, now - self._started)
            self._phase[rank] = phase
            # start-up, the first step's warm-up and what lies between steps are no measure of a step
            if self._in_step[rank] and not {before, phase} & {*_LEFT_TOGETHER}:
                self._longest_gap_s = max(self._longest_gap_s, now - self._seen_at[rank])
            self._in_step[rank] = self._made_steps > 0
            self._stamps[rank], self._seen_at[rank] = stamp, now

    @property
    def all_begun(self) -> bool:
        """Whether every rank has given a sign."""
        return all(self._stamps)

    def silent(
        self, running: list[int], limits: Limits, stopped: Callable[[], tuple[int, ...]] = tuple
    ) -> Silence | None:
        """The rank among `running` that has been silent too long, or None.

        Of ranks that start up, one that stands still (`stopped`, asked once one is silent) is never about to begin.
        """
        now = time.monotonic()
        begins = [rank for rank in running if self._starts(rank) and now - self._last_sign_at(rank) > limits.hang_s]
        still = set(stopped()) & {*begins} if begins else set()
        for rank in sorted(running, key=lambda rank: (rank not in still, self._last_sign_at(rank))):
            age = now - self._last_sign_at(rank)
            allowed = limits.hang_s if rank in still else self._allowed_s(rank, limits)
            if age > allowed:
                when = f"after step {self.steps}" if self._made_steps else self._start_of(rank)
                return Silence(rank, f"rank {rank} gave no sign for {age:.1f} s {when}; {allowed:.1f} s are allowed")
        return None

    def _last_sign_at(self, rank: int) -> float:
        # those with less to build, to read of a checkpoint or to write down wait for the others, without a sign
        return max(self._seen_at) if self._phase[rank] in _LEFT_TOGETHER else self._seen_at[rank]

    def _allowed_s(self, rank: int, limits: Limits) -> float:
        # loading libraries and connecting is no step, nor is writing down a profile, or leaving with a result written
        profiles = self._phase[rank] == RankPhase.PROFILE
        if self._starts(rank) or profiles or RunFile.RESULT.of(self._out_dir).exists():
            return limits.start_s
        if self._made_steps == 0:
            # the first step also makes kernels and connections ready, which goes with how long start-up took
            return max(limits.hang_s, limits.hang_steps * max(limits.step_s, self._start_up_s))
        # with one step seen there may be no gap to go by yet; start-up and that step took longer than one
        longest = self._longest_gap_s if self._made_steps > 1 else max(self._longest_gap_s, self._first_step_s)
        return max(limits.hang_s, limits.hang_steps * longest)

    def _starts(self, rank: int) -> bool:
        return not self._stamps[rank] or (self._made_steps == 0 and self._phase[rank] != RankPhase.STEP)

    def _start_of(self, rank: int) -> str:
        phase = self._phase[rank]
        if phase == RankPhase.STEP:
            return "in its first step"
        # a heartbeat file may hold anything
        return f"before its first step{f', since it began to {phase}' if phase in tuple(RankPhase) else ''}"

    def ages_s(self) -> tuple[float, ...]:
        """Seconds since each rank's last sign."""
        now = time.monotonic()
        return tuple(now - seen for seen in self._seen_at)

    def _count_steps(self) -> None:
        try:
            with RunFile.LOG.of(self._out_dir).open("rb") as log:
                log.seek(self._log_offset)
                new = log.read(1 << 20)
        except OSError:
            return
        self._log_offset += len(new)
        steps = new.count(b"\n")
        self.steps += steps
        if self._phase[0] != RankPhase.RESUME:  # as which it writes down the steps of the training before it
            self._made_steps += steps


def _sign_of_life(heartbeat: Path) -> tuple[int, str] | None:
    """When the file last changed, in ns, and the phase it names; None where there is none.

    Opening the file makes a network file system ask its server, which looking at its name alone does not.
    """
    try:
        with heartbeat.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read(32).decode(errors="replace").strip()
    except OSError:
        return None
