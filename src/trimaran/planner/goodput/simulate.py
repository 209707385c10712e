"""Many trainings on machines that fail, played fault by fault: how their times scatter."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trimaran.planner.goodput.expected import Faulty, expected, stretches

Floats = NDArray[np.float64]


def simulated_s(training: Faulty, runs: int, seed: int) -> Floats:
    """Seconds that each of `runs` trainings takes, shape (runs,); the same for the same seed.

    Of a training of more than _PLAYED_FAULTS faults so much is played as has about that many, and stands for the
    others: the mean grows with their number, the scatter with its root. One that is expected to never end is infinite.
    """
    faults = expected(training).faults
    if not math.isfinite(faults):
        return np.full(runs, np.inf)
    parts = max(1, min(int(faults / _PLAYED_FAULTS), stretches(training)[0]))
    played = _played_s(replace(training, work_s=training.work_s / parts), runs, seed)
    if parts == 1 or not np.isfinite(played).all():
        return played
    mean = played.mean()
    return np.asarray(parts * mean + math.sqrt(parts) * (played - mean))


def _played_s(training: Faulty, runs: int, seed: int) -> Floats:
    """Each turn of the loop is the time from one fault to the next, of all runs that are not done.

    It is a restart, whole stretches that are kept, a part of one that is lost; then the fault, whose node may be away.
    A training that has not come to its end after a million faults is infinite.
    """
    chance = np.random.default_rng(seed)
    whole, rest_s = stretches(training)
    stretch_s, last_s = training.every_s + training.save_s, rest_s + training.save_s if rest_s else 0.0
    now, kept = np.zeros(runs), np.zeros(runs)  # stretches
    restart = np.zeros(runs)  # seconds of restart before the next step
    # when nodes that are away come back, or were back; more than this many are never away
    away = training.rate * training.away_share * training.repair_s
    back_at = np.zeros((runs, min(training.spares, int(away + 12.0 * math.sqrt(away) + 30.0)) + 1))
    going = np.arange(runs)
    for _ in range(_MOST_FAULTS):
        until_fault = chance.exponential(1.0 / training.rate, len(going)) if training.rate else np.full(runs, np.inf)
        needed = (whole - kept[going]) * stretch_s + last_s
        ends = restart[going] + needed <= until_fault
        now[going[ends]] += restart[going[ends]] + needed[ends]
        failed, until_fault = going[~ends], until_fault[~ends]
        if not len(failed):
            return now
        made = np.floor(np.maximum(until_fault - restart[failed], 0.0) / stretch_s)
        kept[failed] += np.maximum(made - _refused(training, chance, len(failed)), 0.0)
        now[failed] += until_fault
        _send_away(training, chance, now, back_at, failed)
        now[failed] += training.detect_s
        restart[failed] = training.restart_s
        going = failed
    now[going] = np.inf
    return now


_MOST_FAULTS, _PLAYED_FAULTS = 1_000_000, 5000


def _refused(training: Faulty, chance: np.random.Generator, count: int) -> Floats:
    """How many checkpoints before each fault, counted back from it, could not be written in a row."""
    if not training.refused:
        return np.zeros(count)
    return (chance.geometric(1.0 - training.refused, count) - 1).astype(np.float64)


def _send_away(
    training: Faulty, chance: np.random.Generator, now: Floats, back_at: Floats, failed: NDArray[np.intp]
) -> None:
    """Have nodes of some of the faults be away, and wait where no spare is left for one."""
    if not training.repair_s:
        return
    away = failed[chance.random(len(failed)) < training.away_share]
    slot = back_at[away].argmin(axis=1)
    back_at[away, slot] = now[away] + chance.exponential(training.repair_s, len(away))
    now[away] = np.maximum(now[away], back_at[away].min(axis=1))
