"""Choose: which candidate to measure next, and when to stop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.layout.layout import Layout
from trimaran.study.tune.surrogate import Floats, believe, features

# The winner is certain when no other candidate is faster by the margin with more than this chance.
DOUBT = 0.05


@dataclass(frozen=True)
class Candidate:
    """A layout that may be measured, with what the cost model says of it."""

    layout: Layout
    predicted_sec_per_it: float
    predicted_mem_gib: float


@dataclass(frozen=True)
class Verdict:
    """Where a tuning stands: the best so far, the next to measure, and how sure it is."""

    best: int | None
    next: int | None
    rival_chance: float
    certain: bool


def decide(
    candidates: Sequence[Candidate],
    measured_s: Mapping[int, float],
    failed: Collection[int],
    prior_error: float,
    margin: float,
    noise: Mapping[int, float] | None = None,
) -> Verdict:
    """Best candidate so far, the most promising next one, and whether the search may stop.

    `measured_s` maps candidate index to measured seconds per iteration; `failed` are those that
    did not run. `margin` is the relative gain that would still matter to the user, `noise` the relative error
    (1 sigma) of each measurement.
    """
    belief = believe(
        [c.layout for c in candidates], [c.predicted_sec_per_it for c in candidates], measured_s, prior_error, noise
    )
    open_ = np.array([i for i in range(len(candidates)) if i not in measured_s and i not in failed], dtype=np.int64)
    best = min(measured_s, key=lambda index: measured_s[index]) if measured_s else None
    if open_.size == 0:
        return Verdict(best, None, 0.0, best is not None)
    chance_runs = _chance_runs(candidates, failed)[open_]
    if best is None:
        order = belief.mean[open_] - np.log(np.maximum(chance_runs, 1e-9))
        return Verdict(None, int(open_[np.argmin(order)]), 1.0, False)
    best_log = float(belief.mean[best])  # of noisy times the least is likely too low
    gain = belief.expected_gain(best_log)[open_] * chance_runs
    rivals = belief.chance_faster(best, margin)[open_] * chance_runs
    rival_chance = float(np.max(rivals))
    return Verdict(best, int(open_[np.argmax(gain)]), rival_chance, rival_chance < DOUBT)


def _chance_runs(candidates: Sequence[Candidate], failed: Collection[int]) -> Floats:
    """Chance that each candidate runs at all, given what failed: what resembles a failure is doubted.

    A candidate that wants at least as much memory as a failed one on the same layout family is
    doubted most.
    """
    chance = np.ones(len(candidates))
    if not failed:
        return chance
    points = features([c.layout for c in candidates])
    memory = np.array([c.predicted_mem_gib for c in candidates])
    for index in failed:
        near = np.exp(-0.5 * np.sum((points - points[index]) ** 2, axis=1))
        chance *= 1.0 - 0.9 * near * np.where(memory >= 0.97 * memory[index], 1.0, 0.3)
    return chance
