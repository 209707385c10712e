"""Scores of predictions against measurements: relative error, rank agreement, regret of the pick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# So many values are compared pair by pair.
_FEW = 64


@dataclass(frozen=True)
class Score:
    """How well predictions of one group agree with what was measured. Shares are 0 to 1."""

    rows: int
    mape: float
    tau: float | None
    regret: float | None


def mape(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean absolute percentage error, as a share: mean |predicted / measured - 1|."""
    return float(np.mean(np.abs(np.asarray(predicted) / np.asarray(measured) - 1.0)))


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Kendall's tau-b of two rankings (ties corrected), or None below two distinct values."""
    p, m = np.asarray(predicted, float), np.asarray(measured, float)
    pairs = len(p) * (len(p) - 1) // 2
    tied_p, tied_m, tied_in_both = _tied_pairs(p), _tied_pairs(m), _tied_pairs(np.stack((p, m), axis=1))
    discordant = _falling_pairs(m[np.lexsort((m, p))])
    concordant = pairs - tied_p - tied_m + tied_in_both - discordant
    norm = np.sqrt(float(pairs - tied_p) * float(pairs - tied_m))
    return float((concordant - discordant) / norm) if norm else None


def _tied_pairs(values: NDArray[np.float64]) -> int:
    """Pairs of equal entries along the first axis."""
    counts = np.unique(values, axis=0, return_counts=True)[1]
    return int(np.sum(counts * (counts - 1) // 2))


def _falling_pairs(values: NDArray[np.float64]) -> int:
    """Pairs of which the first is larger, by merge sort as Knight (1966) counts them: in O(n log^2 n), and O(n) memory.

    Both halves have pairs of their own; across them, each value of the second falls from all larger ones of the first.
    """
    if len(values) <= _FEW:
        return int(np.count_nonzero(np.triu(values[:, None] > values[None, :], k=1)))
    first, second = np.split(values, [len(values) // 2])
    not_larger = np.searchsorted(np.sort(first), second, side="right")
    return int(np.sum(len(first) - not_larger)) + _falling_pairs(first) + _falling_pairs(second)


def top1_regret(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """How much slower the pick (the least predicted) is than the best measured, as a share.

    None where there is nothing to pick from, or a time of zero to compare with.
    """
    if len(measured) < 2 or min(measured) <= 0:
        return None
    pick = int(np.argmin(np.asarray(predicted)))
    return float(measured[pick] / min(measured) - 1.0)


def score(predicted: Sequence[float], measured: Sequence[float], work: Sequence[float] | None = None) -> Score:
    """Score one comparable group.

    `work` (global batches) makes times of different batches comparable: ranks are by time per sequence.
    """
    per = np.ones(len(measured)) if work is None else np.asarray(work, float)
    ranked_p, ranked_m = np.asarray(predicted) / per, np.asarray(measured) / per
    return Score(
        rows=len(measured),
        mape=mape(predicted, measured),
        tau=kendall_tau(ranked_p.tolist(), ranked_m.tolist()) if len(measured) > 1 else None,
        regret=top1_regret(ranked_p.tolist(), ranked_m.tolist()),
    )
