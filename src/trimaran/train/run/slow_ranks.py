"""Slow ranks: those that take longer for their own work than others do for the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimaran.layout.axes import groups
from trimaran.layout.layout import Layout

# A rank is slow where it takes so many times what the others take, in the median of so many steps.
FACTOR, STEPS = 1.5, 20
# It is as fast as the others again where it takes less than this; in between nothing is told.
OVER = 1.25
# Where steps take milliseconds, a slice of time that the kernel gives to another program is as long as one (3 ms on 8
# cores: 0.75 ms x (1 + log2 of the cores), kernel/sched/fair.c, sysctl_sched_base_slice). A few of them are no fault.
FLOOR_S = 0.01

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SlowRank:
    """A rank that has become slow, and the sentence that says so."""

    rank: int
    sentence: str


class SlowRanks:
    """Names ranks as they become slow, by each rank's own seconds of every step.

    Ranks of one pipeline stage do the same work and are compared by the lower median of their stage. A stage of a
    single rank is compared with its own best pace so far, and is slow where the others have kept theirs. So is every
    rank where replicas take unlike numbers of micro-batches.
    """

    def __init__(self, layout: Layout) -> None:
        alike = ("cp", "tp") if layout.replica_batches else ("dp", "cp", "tp")
        self._stages = [np.array(ranks) for ranks in groups(layout, *alike)]
        self._steps: deque[Floats] = deque(maxlen=STEPS)
        self._best = np.full(layout.devices, np.inf)
        self._slow: set[int] = set()

    def after(self, own_s: Sequence[float], samples: int) -> Iterator[SlowRank]:
        """Take a step's own seconds by rank, and how many samples it had; the ranks that are newly slow."""
        self._steps.append(np.array(own_s) / samples)
        if len(self._steps) < STEPS:
            return
        pace = np.median(self._steps, axis=0)
        usual = self._usual(pace)
        self._best = np.minimum(self._best, pace)
        times = pace / usual
        times /= _lower_median(times)
        late_s = (pace - usual) * samples
        for rank in np.flatnonzero((times > FACTOR) & (late_s > FLOOR_S)).tolist():
            if rank not in self._slow:
                self._slow.add(rank)
                yield SlowRank(
                    rank,
                    f"{times[rank]:.1f} times the others' median over {STEPS} steps: {pace[rank] * samples:.3f} s of "
                    f"its own a step, {usual[rank] * samples:.3f} s are usual",
                )
        self._slow -= set(np.flatnonzero(times < OVER).tolist())

    def _usual(self, pace: Floats) -> Floats:
        usual: Floats = np.minimum(self._best, pace)
        for ranks in self._stages:
            if len(ranks) > 1:
                usual[ranks] = _lower_median(pace[ranks])
        usual[usual <= 0.0] = 1e-12  # clocks that saw nothing
        return usual


def _lower_median(values: Floats) -> float:
    """The middle value, of two middle ones the lower."""
    return float(np.partition(values, (len(values) - 1) // 2)[(len(values) - 1) // 2])
