"""Scores of predictions against measurements: relative error, rank agreement, regret of the pick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
    upper = np.triu_indices(len(p), k=1)
    a = np.sign(p[:, None] - p[None, :])[upper]
    b = np.sign(m[:, None] - m[None, :])[upper]
    norm = np.sqrt(float(np.sum(a != 0)) * float(np.sum(b != 0)))
    return float(np.sum(a * b) / norm) if norm else None


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
