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

from trimaran.cost.likeness import likeness
from trimaran.layout.choices import CHOICES
from trimaran.layout.layout import Layout

Floats = NDArray[np.float64]

# Part of the error that all layouts share (the machine's state on the day), as variance.
_SHARED = 0.5
# What a trial may differ by when it is run again, relative (1 sigma), where its rows do not say.
NOISE_STD = 0.01


@dataclass(frozen=True)
class Belief:
    """Log seconds per iteration of every candidate: mean, shape (n,), and covariance, shape (n, n)."""

    mean: Floats
    covariance: Floats

    @property
    def std(self) -> Floats:
        """Standard deviation of each, shape (n,)."""
        return np.sqrt(np.diagonal(self.covariance))

    def chance_faster(self, than: int, by: float) -> Floats:
        """Probability that each candidate takes less than 1 - `by` of the time of candidate `than`, shape (n,).

        What the two have in common, the machine's state and the model's error, does not count.
        """
        variance = np.diagonal(self.covariance)
        apart = np.sqrt(np.maximum(variance + variance[than] - 2 * self.covariance[than], 1e-18))
        return _normal_cdf((self.mean[than] + np.log(1.0 - by) - self.mean) / apart)

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
    """Coordinates of layouts in units of the length scales, shape (n, coordinates)."""
    rows = [
        [number for choice in CHOICES for number in choice.coordinates(getattr(layout, choice.name))]
        for layout in layouts
    ]
    return np.asarray(rows, dtype=np.float64)


def believe(
    layouts: Sequence[Layout],
    predicted_s: Sequence[float],
    measured_s: Mapping[int, float],
    prior_error: float,
    noise: Mapping[int, float] | None = None,
) -> Belief:
    """Belief over all candidates after some were measured.

    `predicted_s` are the cost model's seconds; `measured_s` maps a candidate's index to its
    seconds; `prior_error` is the model's relative error (1 sigma) before anything is measured; `noise` is
    that of each measurement, NOISE_STD where it is not stated.
    """
    prior = np.log(np.asarray(predicted_s, dtype=np.float64))
    points = features(layouts)
    everywhere = _kernel(points, points, prior_error**2)
    if not measured_s:
        return Belief(prior, everywhere)
    seen = np.fromiter(measured_s.keys(), dtype=np.int64)
    residual = np.log(np.fromiter(measured_s.values(), dtype=np.float64)) - prior[seen]
    sigma = np.array([(noise or {}).get(int(index), NOISE_STD) for index in seen])
    across = everywhere[:, seen]
    solved = np.linalg.solve(across[seen] + np.diag(sigma**2), np.column_stack([residual[:, None], across.T]))
    left = everywhere - across @ solved[:, 1:]
    np.fill_diagonal(left, np.maximum(np.diagonal(left), 1e-12))
    return Belief(prior + across @ solved[:, 0], left)


def _kernel(a: Floats, b: Floats, variance: float) -> Floats:
    return np.asarray(variance * (_SHARED + (1 - _SHARED) * likeness(a, b)))


def _normal_cdf(z: Floats) -> Floats:
    """Standard normal distribution function (Abramowitz and Stegun 7.1.26, error below 1.5e-7)."""
    x = np.abs(z) / np.sqrt(2.0)
    t = 1.0 / (1.0 + 0.3275911 * x)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = np.sign(z) * (1.0 - series * np.exp(-x * x))
    return np.asarray(0.5 * (1.0 + erf))
