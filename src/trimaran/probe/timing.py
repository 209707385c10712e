"""Timing that repeats: warm-up thrown away, cases taken in turns, disturbed samples passed over."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

Case = TypeVar("Case", bound=Hashable)

# A sample shorter than this is mostly the clock's and the scheduler's noise.
SAMPLE_S = 0.002
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


def mean_seconds(samples: Mapping[Case, Sequence[float]]) -> dict[Case, float]:
    """What each case takes on average, of samples of which some were disturbed.

    A step adds up hundreds of such times, so it takes their means, which lie 1 to 2% above their lower quartiles on a
    machine left alone. How far above is taken of all cases together, as the median of their ratios: a disturbance of
    some of them does not move it. Of one case alone the lower quartile stands.
    """
    quiet = {case: undisturbed(taken) for case, taken in samples.items() if taken}
    if len(quiet) < 2:
        return quiet
    above = statistics.median(statistics.fmean(samples[case]) / seconds for case, seconds in quiet.items())
    return {case: seconds * above for case, seconds in quiet.items()}


def timed(
    cases: Iterable[Case],
    prepare: Callable[[Case], Callable[[], object]],
    rounds: int,
    device: torch.device,
    limit_s: float = math.inf,
) -> dict[Case, float]:
    """Mean seconds of every case over `rounds` rounds, each round going through all cases.

    No sample is begun after `limit_s`: the cases that were not reached by then are left out, but for the first.

    A slow moment of the machine then falls on one sample of many cases and not on all samples
    of one. `prepare` is called anew in each round, so that memory holds the operands of one
    case at a time.
    """
    samples: dict[Case, list[float]] = {case: [] for case in cases}
    runs: dict[Case, int] = {}
    begin = time.perf_counter()
    for _ in range(rounds):
        for case, taken in samples.items():
            if runs and time.perf_counter() - begin > limit_s:
                break
            run = prepare(case)
            once = seconds_of(run, 1, device)
            if case not in runs:
                once = seconds_of(run, 1, device)  # the very first run of a shape builds kernels
                runs[case] = min(_MOST_RUNS_A_SAMPLE, math.ceil(SAMPLE_S / max(once, 1e-9)))
            taken.append(seconds_of(run, runs[case], device) if runs[case] > 1 else once)
    return mean_seconds(samples)
