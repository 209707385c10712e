"""Surrogate: what measured layouts teach about those not measured yet.

The cost model predicts log time; its error is a Gaussian process over layouts, so that layouts
that resemble each other err alike (Rasmussen and Williams, Gaussian Processes for Machine
Learning, eqs. 2.25 and 2.26). With nothing measured the prediction stands with its prior error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimaran.layout import Layout

Floats = NDArray[np.float64]

# Doubling a degree changes what the model may have wrong; so does switching recompute or the
# schedule. One unit is one length scale of the process.
_SCALES = {"dp": 0.4, "tp": 0.7, "pp": 0.5, "mbs": 0.4}
_SWITCH = 1.0
# Part of the error that all layouts share (the machine's state on the day), as variance.
_SHARED = 0.5
_NOISE_STD = 0.01


@dataclass(frozen=True)
class Belief:
    """Log seconds per iteration of every candidate: mean and standard deviation, shape (n,)."""

    mean: Floats
    std: Floats

    def chance_below(self, log_seconds: float) -> Floats:
        """Probability that each candidate is faster than `log_seconds`, shape (n,)."""
        return _normal_cdf((log_seconds - self.mean) / np.maximum(self.std, 1e-9))

    def expected_gain(self, best_log_seconds: float) -> Floats:
        """Expected improvement over the best so far, in log seconds, shape (n,).

        Jones, Schonlau and Welch (1998), eq. 15.
        """
        std = np.maximum(self.std, 1e-9)
        gap = best_log_seconds - self.mean
        z = gap / std
        density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
        return np.asarray(gap * _normal_cdf(z) + std * density)


def features(layouts: Sequence[Layout]) -> Floats:
    """Coordinates of layouts in units of the length scales, shape (n, 7)."""
    rows = [
        [
            *(scale * np.log2(getattr(layout, name)) for name, scale in _SCALES.items()),
            _SWITCH * ("none", "selective", "full").index(layout.recompute),
            _SWITCH * layout.zero_stage / 2,
            _SWITCH * (layout.schedule == "gpipe"),
        ]
        for layout in layouts
    ]
    return np.asarray(rows, dtype=np.float64)


def believe(
    layouts: Sequence[Layout], predicted_s: Sequence[float], measured_s: Mapping[int, float], prior_error: float
) -> Belief:
    """Belief over all candidates after some were measured.

    `predicted_s` are the cost model's seconds; `measured_s` maps a candidate's index to its
    seconds; `prior_error` is the model's relative error (1 sigma) before anything is measured.
    """
    prior = np.log(np.asarray(predicted_s, dtype=np.float64))
    variance = prior_error**2
    if not measured_s:
        return Belief(prior, np.full(len(prior), prior_error))
    points = features(layouts)
    seen = np.fromiter(measured_s.keys(), dtype=np.int64)
    residual = np.log(np.fromiter(measured_s.values(), dtype=np.float64)) - prior[seen]
    among = _kernel(points[seen], points[seen], variance) + _NOISE_STD**2 * np.eye(len(seen))
    across = _kernel(points, points[seen], variance)
    solved = np.linalg.solve(among, np.column_stack([residual[:, None], across.T]))
    mean = prior + across @ solved[:, 0]
    left = variance - np.einsum("ij,ji->i", across, solved[:, 1:])
    return Belief(mean, np.sqrt(np.maximum(left, _NOISE_STD**2)))


def _kernel(a: Floats, b: Floats, variance: float) -> Floats:
    squared = np.sum((a[:, None, :] - b[None, :, :]) ** 2, axis=-1)
    return np.asarray(variance * (_SHARED + (1 - _SHARED) * np.exp(-0.5 * squared)))


def _normal_cdf(z: Floats) -> Floats:
    """Standard normal distribution function (Abramowitz and Stegun 7.1.26, error below 1.5e-7)."""
    x = np.abs(z) / np.sqrt(2.0)
    t = 1.0 / (1.0 + 0.3275911 * x)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = np.sign(z) * (1.0 - series * np.exp(-x * x))
    return np.asarray(0.5 * (1.0 + erf))
