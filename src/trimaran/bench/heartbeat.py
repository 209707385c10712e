"""Telling a hang from slowness: the pulse of every rank."""

from __future__ import annotations

import time
from pathlib import Path

from trimaran.bench.limits import Limits


class Pulse:
    """Watches `heartbeat.<rank>` files and the lines of `log.jsonl` in a trial's folder.

    Ages are measured on this process's monotonic clock from the moment a change was seen, so
    that neither a clock that is set nor a laptop that sleeps looks like a hang.
    """

    def __init__(self, out_dir: Path, ranks: int) -> None:
        self._out_dir = out_dir
        self._started = time.monotonic()
        self._stamps: list[int] = [0] * ranks
        self._seen_at = [self._started] * ranks
        self._in_step = [False] * ranks
        self._longest_gap_s = 0.0
        self._first_step_s = 0.0
        self._log_offset = 0
        self.steps = 0

    def observe(self) -> None:
        """Look at the files once."""
        self._count_steps()
        now = time.monotonic()
        if self.steps and not self._first_step_s:
            self._first_step_s = now - self._started
        for rank in range(len(self._stamps)):
            try:
                stamp = (self._out_dir / f"heartbeat.{rank}").stat().st_mtime_ns
            except OSError:
                continue
            if stamp == self._stamps[rank]:
                continue
            # start-up and the first step's warm-up are no measure of a step
            if self._in_step[rank]:
                self._longest_gap_s = max(self._longest_gap_s, now - self._seen_at[rank])
            self._in_step[rank] = self.steps > 0
            self._stamps[rank], self._seen_at[rank] = stamp, now

    def silent(self, running: list[int], limits: Limits) -> str | None:
        """A sentence naming the rank among `running` that has been silent too long, or None."""
        if not running:
            return None
        quietest = min(running, key=lambda rank: self._seen_at[rank])
        age = time.monotonic() - self._seen_at[quietest]
        allowed = self._allowed_s(limits)
        when = f"after step {self.steps}" if self.steps else "before its first step"
        if age <= allowed:
            return None
        return f"rank {quietest} gave no sign for {age:.1f} s {when}; {allowed:.1f} s are allowed"

    def _allowed_s(self, limits: Limits) -> float:
        # loading libraries and connecting is no step, and neither is leaving with a result written
        if self.steps == 0 or (self._out_dir / "result.json").exists():
            return limits.start_s
        # with one step seen there may be no gap to go by yet; start-up and that step took longer than one
        longest = self._longest_gap_s if self.steps > 1 else max(self._longest_gap_s, self._first_step_s)
        return max(limits.hang_s, limits.hang_steps * longest)

    def ages_s(self) -> tuple[float, ...]:
        """Seconds since each rank's last sign."""
        now = time.monotonic()
        return tuple(now - seen for seen in self._seen_at)

    def _count_steps(self) -> None:
        try:
            with (self._out_dir / "log.jsonl").open("rb") as log:
                log.seek(self._log_offset)
                new = log.read(1 << 20)
        except OSError:
            return
        self._log_offset += len(new)
        self.steps += new.count(b"\n")
