"""Choose: which candidate to measure next, and when to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.layout.layout import Layout
from trimaran.nouns.measurement import NOT_OF_THE_LAYOUT, Measurement
from trimaran.study.tune.surrogate import NOISE_STD, Floats, believe, features

# The winner is certain when no other candidate is faster by the margin with more than this chance.
DOUBT = 0.05


@dataclass(eq=False)
class Candidate:
    """A layout that may be measured, and all that is known of it so far.

    The predictions are the cost model's, made anew as it learns. `stated` says that the recipe names the layout.
    `row` is what was measured, None before that, and `noise` the relative error (1 sigma) of its seconds.
    """

    layout: Layout
    predicted_sec_per_it: float
    predicted_mem_gib: float
    stated: bool = False
    row: Measurement | None = None
    noise: float = NOISE_STD

    @property
    def seconds(self) -> float | None:
        """Measured seconds per iteration; None where nothing was measured or the layout did not run."""
        return self.row.sec_per_it if self.row is not None and self.row.status == "ok" else None

    @property
    def failed(self) -> bool:
        """Whether the layout was tried and did not run, for a reason of its own."""
        return self.row is not None and self.seconds is None and self.row.status not in NOT_OF_THE_LAYOUT


@dataclass(frozen=True)
class Verdict:
    """Where a tuning stands: the best so far, the next to measure, and how sure it is."""

    best: Candidate | None
    next: Candidate | None
    rival_chance: float
    certain: bool


def decide(candidates: Sequence[Candidate], prior_error: float, margin: float) -> Verdict:
    """Best candidate so far, the most promising next one, and whether the search may stop.

    `prior_error` is the cost model's relative error (1 sigma), `margin` the relative gain that would still matter to
    the user.
    """
    seconds = {index: known.seconds for index, known in enumerate(candidates) if known.seconds is not None}
    belief = believe(
        [candidate.layout for candidate in candidates],
        [candidate.predicted_sec_per_it for candidate in candidates],
        seconds,
        prior_error,
        {index: candidates[index].noise for index in seconds},
    )
    untried = np.array([index for index, known in enumerate(candidates) if known.row is None], dtype=np.int64)
    best = min(seconds, key=lambda index: seconds[index], default=None)
    winner = None if best is None else candidates[best]
    if untried.size == 0:
        return Verdict(winner, None, 0.0, best is not None)
    chance_runs = _chance_runs(candidates)[untried]
    if best is None:
        order = belief.mean[untried] - np.log(np.maximum(chance_runs, 1e-9))
        return Verdict(None, candidates[untried[np.argmin(order)]], 1.0, False)
    best_log = float(belief.mean[best])  # of noisy times the least is likely too low
    gain = belief.expected_gain(best_log)[untried] * chance_runs
    rivals = belief.chance_faster(best, margin)[untried] * chance_runs
    rival_chance = float(np.max(rivals))
    return Verdict(winner, candidates[untried[np.argmax(gain)]], rival_chance, rival_chance < DOUBT)


def _chance_runs(candidates: Sequence[Candidate]) -> Floats:
    """Chance that each candidate runs at all, given what failed: what resembles a failure is doubted.

    A candidate that wants at least as much memory as a failed one on the same layout family is
    doubted most.
    """
    chance = np.ones(len(candidates))
    failed = [index for index, candidate in enumerate(candidates) if candidate.failed]
    if not failed:
        return chance
    points = features([candidate.layout for candidate in candidates])
    memory = np.array([candidate.predicted_mem_gib for candidate in candidates])
    for index in failed:
        near = np.exp(-0.5 * np.sum((points - points[index]) ** 2, axis=1))
        chance *= 1.0 - 0.9 * near * np.where(memory >= 0.97 * memory[index], 1.0, 0.3)
    return chance
