"""Timing that repeats: warm-up thrown away, cases taken in turns, disturbed samples passed over."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import torch

Case = TypeVar("Case", bound=Hashable)

# A sample shorter than this is mostly the clock's and the scheduler's noise.
SAMPLE_S = 0.002
# A case may take so many times its equal share of the limit, and by what a smaller one of its kind took no single run a
# larger part of the limit: a processor without bf16 takes a minute for one product of 2,048, where it takes 0.3 s in
# fp32, and its products in fp32 then had one sample each.
SHARES_OF_A_CASE = 4.0
DEAREST_RUN = 1 / 20
_MOST_RUNS_A_SAMPLE = 2000


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], runs: int, device: torch.device) -> float:
    """Mean seconds of one of `runs` runs in a row."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(runs):
        run()
    synchronize(device)
    return (time.perf_counter() - begin) / runs


def undisturbed(samples: Sequence[float]) -> float:
    """The lower quartile of samples of a time.

    What else the machine does can only lengthen a sample. On a machine left alone this is within
    a per cent of the median; beside other work it repeats three to four times better.
    """
    return statistics.quantiles(samples, n=4, method="inclusive")[0] if len(samples) > 1 else samples[0]


def mean_seconds(spells: Sequence[Mapping[Case, Sequence[float]]]) -> dict[Case, float]:
    """What each case takes on average on a machine left alone, of samples in spells of which some were disturbed.

    A step adds up hundreds of such times, so it takes their means, which lie 1 to 2% above their lower quartiles on a
    machine left alone. How far above is taken of all cases and spells together, as the median of their ratios: neither
    a disturbance of some cases moves it nor a whole spell beside a busy neighbour, which took products 1.7 times as
    long and would be in the mean of every case. Of one case alone the lower quartile stands.
    """
    samples: dict[Case, list[float]] = {}
    for spell in spells:
        for case, taken in spell.items():
            samples.setdefault(case, []).extend(taken)
    quiet = {case: undisturbed(taken) for case, taken in samples.items() if taken}
    if len(quiet) < 2:
        return quiet
    above = statistics.median(
        statistics.fmean(taken) / undisturbed(taken) for spell in spells for taken in spell.values() if taken
    )
    return {case: seconds * above for case, seconds in quiet.items()}


class Timing(Generic[Case]):
    """Mean seconds of cases over `rounds` rounds, each of which goes through all of them, taken in spells.

    A slow moment of the machine then falls on one sample of many cases and not on all samples of one; and one that
    lasts for half a minute falls on one spell of all cases and not on all of one: of three probes in a row that timed
    attention in one go, its times differed by 30%. No sample is begun after a spell's share of `limit_s`, and none of
    a case that has had its own part of it (`SHARES_OF_A_CASE`): the cases that were not reached by the end are left
    out, but for the first. `work` says of what kind a case is and how much it does, by which one that would take too
    long (`DEAREST_RUN`) is `left_out`.

    `preparing` is called anew in each spell and what it returns for each sample, so that memory holds the operands of
    one case at a time, and nothing between spells.
    """

    def __init__(
        self,
        cases: Iterable[Case],
        preparing: Callable[[], Callable[[Case], Callable[[], object]]],
        rounds: int,
        device: torch.device,
        limit_s: float = math.inf,
        work: Callable[[Case], tuple[Hashable, float]] | None = None,
    ) -> None:
        self._cases, self._spells = tuple(cases), list[dict[Case, list[float]]]()
        self._preparing, self._rounds, self._device, self._limit_s = preparing, rounds, device, limit_s
        self._work = work
        # seconds of one run for each unit of work, by kind: the least that any case took
        self._pace: dict[Hashable, float] = {}
        self.left_out: set[Case] = set()
        self._runs: dict[Case, int] = {}
        self._spent_on: dict[Case, float] = {}
        self._taken, self._spent_s = 0, 0.0

    def spell(self, share: float = 1.0) -> None:
        """Take samples until `share` of all has been taken, or of the time."""
        prepare, samples = self._preparing(), defaultdict[Case, list[float]](list)
        self._spells.append(samples)
        begin = time.perf_counter() - self._spent_s
        while self._taken < share * self._rounds * len(self._cases):
            if self._runs and time.perf_counter() - begin > share * self._limit_s:
                break
            case = self._cases[self._taken % len(self._cases)]
            if not self._is_dear(case):
                self.left_out.discard(case)
                begun = time.perf_counter()
                samples[case].append(self._sample(case, prepare(case)))
                self._spent_on[case] = self._spent_on.get(case, 0.0) + time.perf_counter() - begun
            self._taken += 1
        self._spent_s = time.perf_counter() - begin

    def _is_dear(self, case: Case) -> bool:
        """Whether a case has had its part of the limit, or is known to take too long for a first run."""
        if case in self._spent_on:
            return self._spent_on[case] > SHARES_OF_A_CASE * self._limit_s / len(self._cases)
        if self._work is None or not self._runs:
            return False
        kind, amount = self._work(case)
        if self._pace.get(kind, 0.0) * amount <= DEAREST_RUN * self._limit_s:
            return False
        self.left_out.add(case)
        return True

    def _sample(self, case: Case, run: Callable[[], object]) -> float:
        once = seconds_of(run, 1, self._device)
        if case not in self._runs:
            if once < DEAREST_RUN * self._limit_s:
                once = seconds_of(run, 1, self._device)  # the very first run of a shape builds kernels
            self._runs[case] = min(_MOST_RUNS_A_SAMPLE, math.ceil(SAMPLE_S / max(once, 1e-9)))
            self._remember(case, once)
        runs = self._runs[case]
        return seconds_of(run, runs, self._device) if runs > 1 else once

    def _remember(self, case: Case, seconds: float) -> None:
        if self._work is not None:
            kind, amount = self._work(case)
            self._pace[kind] = min(self._pace.get(kind, math.inf), seconds / amount)

    def seconds(self) -> dict[Case, float]:
        """What each case takes by the samples of all spells so far."""
        return mean_seconds(self._spells)
