"""Two runs beside each other: what differs between them, and how sure their step times make the difference."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np

from trimaran.nouns.columns import BY_NAME, Cell
from trimaran.nouns.measurement import Measurement

CONFIDENCE = 0.95
_NORMAL_QUANTILE = 1.959964  # of CONFIDENCE, two-sided
_MAX_STEPS = 2000
_NOT_COMPARED = frozenset({"source", "section", "table", "row", "quality", "notes"})


@dataclass(frozen=True)
class Comparison:
    """Run B against run A.

    `ratio` is B's sec/it over A's. `low` and `high` bound the ratio of typical steps at CONFIDENCE, and
    `p_value` is the chance of step times so far apart if both runs were equally fast; all three are
    None where a run keeps too few step times. They speak of these two runs: the machine of another day
    adds its own difference. `differs` holds the columns in which the runs differ, as (A, B).
    """

    ratio: float | None
    low: float | None
    high: float | None
    p_value: float | None
    steps: tuple[int, int]
    differs: dict[str, tuple[Cell, Cell]]

    @property
    def verdict(self) -> str:
        """The comparison in one sentence."""
        if self.ratio is None:
            return "one of the runs was not timed: there is no difference to state"
        change = self.ratio - 1.0
        difference = f"B takes {abs(change):.2%} {'more' if change > 0 else 'less'} time than A"
        if self.low is None or self.high is None:
            kept = f"{min(self.steps)} step times are" if min(self.steps) else "no step times are kept,"
            return f"{difference}; {kept} too few to say how sure that is"
        bounds = f"{self.low - 1:+.2%} to {self.high - 1:+.2%} with {CONFIDENCE:.0%} confidence, p = {self.p_value:.2g}"
        told_apart = self.low > 1.0 or self.high < 1.0
        return f"{difference} ({bounds})" + ("" if told_apart else ": the steps do not tell the runs apart")


def compare(a: Measurement, b: Measurement) -> Comparison:
    """Run B against run A.

    The bounds are those of the Hodges-Lehmann shift of log step times, that is the inverted Mann-Whitney
    test: they assume no distribution, and stragglers do not sway them.
    """
    first, second = timed_steps(a), timed_steps(b)
    ratio = b.sec_per_it / a.sec_per_it if a.sec_per_it and b.sec_per_it else None
    low, high = _bounds(first, second)
    cells = {name: (getattr(a, name), getattr(b, name)) for name in BY_NAME if name not in _NOT_COMPARED}
    return Comparison(
        ratio=ratio,
        low=low,
        high=high,
        p_value=None if low is None else _p_value(first, second),
        steps=(len(first), len(second)),
        differs={name: pair for name, pair in cells.items() if pair[0] != pair[1]},
    )


def timed_steps(run: Measurement) -> list[float]:
    """The steps that sec_per_it is the median of: all but the warm-up, whose length no row states."""
    times = [seconds for seconds in run.step_times_s if seconds > 0]
    if run.sec_per_it is not None:
        for warmup in range(min(len(times), 100)):
            if math.isclose(statistics.median(times[warmup:]), run.sec_per_it, rel_tol=1e-9):
                return times[warmup:]
    return times[1:]


def _bounds(a: list[float], b: list[float]) -> tuple[float | None, float | None]:
    """Bounds on the ratio of B's typical step to A's: order statistics of all pairwise log ratios."""
    x, y = (np.log(np.asarray(_thinned(times))) for times in (a, b))
    pairs = x.size * y.size
    if pairs == 0:
        return None, None
    spread = math.sqrt(pairs * (x.size + y.size + 1) / 12.0)
    below = math.floor(pairs / 2.0 - _NORMAL_QUANTILE * spread)
    if below < 1:
        return None, None
    shifts = np.sort((y[:, None] - x[None, :]).ravel())
    return float(np.exp(shifts[below - 1])), float(np.exp(shifts[pairs - below]))


def _p_value(a: list[float], b: list[float]) -> float:
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(_thinned(a), _thinned(b), alternative="two-sided").pvalue)


def _thinned(times: list[float]) -> list[float]:
    """Evenly spaced steps of a long run: the pairs of two runs are held in memory at once."""
    stride = -(-len(times) // _MAX_STEPS)
    return times[:: stride or 1]
