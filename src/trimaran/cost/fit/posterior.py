"""What rows say of a start's errors: one Gaussian model of all that they may have in common, averaged over beliefs.

The log residuals r of the rows (measured over predicted) are r ~ N(m, v K), with

    K = scale (0.7 + 0.3 [same day]) + similar S + efficiencies J J^T / 0.2^2 + own I

S the likeness of the runs (`trimaran.cost.likeness`), J the derivatives by efficiencies in widths of their priors,
which hold where a start errs by a fifth, taken where efficiencies are most likely; v = (t e)^2, e the error that the
start states of itself. How much of it is of which kind (`Belief`), and t, are averaged over by their marginal
likelihood (Rasmussen and Williams, Gaussian Processes for Machine Learning, sections 2.7 and 5.2), of efficiencies by
Laplace's method (ibid., section 3.4). A run has more ways to be slow than to be fast: a prediction of least relative
error lies below the mean log of a time by the variance of what is each run's own, so that m = v own where errors are
`skewed`, and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimaran.cost.grid import Bools, Floats

# The start's own error over the one that it states, and how far (log, 1 sigma) it may well be from its usual; the mean
# of its squares is 1.
FACTORS = np.array([0.125, 0.25, 0.5, 1.0, 2.0, 4.0])
FACTOR_WIDTH = 0.8
USUAL_FACTOR = float(np.exp(-(FACTOR_WIDTH**2)))
# The part of what all rows share that is of the day.
OF_THE_DAY = 0.3
# The error of a start that was fitted to nothing: widths of efficiencies are stated for it.
USUAL_ERROR = 0.2
LEAST_ERROR = 0.01


@dataclass(frozen=True)
class Belief:
    """How a start's errors split, as shares of their variance: `kind` is the word that a fit's report uses."""

    kind: str
    scale: float
    similar: float
    efficiencies: float
    own: float


BELIEFS = (
    Belief("similar runs", 0.0, 0.5, 0.0, 0.5),
    Belief("similar runs", 0.0, 0.9, 0.0, 0.1),
    Belief("each run", 0.0, 0.0, 0.0, 1.0),
    Belief("one scale", 0.4, 0.4, 0.0, 0.2),
    Belief("one scale", 0.5, 0.0, 0.0, 0.5),
    Belief("one scale", 0.95, 0.0, 0.0, 0.05),
    Belief("efficiencies", 0.1, 0.2, 0.5, 0.2),
    Belief("efficiencies", 0.1, 0.1, 0.78, 0.02),
)


@dataclass(frozen=True)
class Rows:
    """Log residuals of n rows, shape (n,), derivatives (n, efficiencies), likeness and whether of one day (n, n).

    `residuals` are those of the start where efficiencies have moved to `x`, in widths, as are the derivatives;
    `unmoved` are the start's own, of beliefs in which no efficiency moves.
    """

    residuals: Floats
    unmoved: Floats
    x: Floats
    jacobian: Floats
    likeness: Floats
    same_day: Bools

    @property
    def days_differ(self) -> bool:
        """Whether the rows are of several days."""
        return not bool(self.same_day.all())


@dataclass(frozen=True)
class Posterior:
    """What n rows teach.

    `scale` and each row's `day` (n,) are logs, `moves` (efficiencies,) in widths, `similar` (n,) weights of the
    likeness to each row. `covariance` is of (scale, moves), `kept` the share of each one's prior variance that is left,
    where it counts at all. `error` is what unseen runs differ by (1 sigma, log); `kinds` how likely each kind of belief
    is. `left_out` are the rows' residuals when their group is predicted by the others.
    """

    scale: float
    day: Floats
    moves: Floats
    similar: Floats
    covariance: Floats
    kept: Floats
    error: float
    kinds: dict[str, float]
    left_out: Floats


def variances(error: float) -> Floats:
    """V of a start that states this error, under each factor, shape (factors,)."""
    return np.asarray((FACTORS * max(error, LEAST_ERROR)) ** 2)


def covariance_alone(belief: Belief, rows: Rows) -> Floats:
    """K of the rows but for what efficiencies add, shape (n, n)."""
    together = (1.0 - OF_THE_DAY) + OF_THE_DAY * rows.same_day
    own = belief.own * np.eye(len(rows.residuals))
    return np.asarray(belief.scale * together + belief.similar * rows.likeness + own)


def chances(belief: Belief, odds: Mapping[str, float]) -> Floats:
    """Logs of how likely a belief is under each factor before any row, shape (factors,); `odds` are those of kinds."""
    same_kind = sum(other.kind == belief.kind for other in BELIEFS)
    far = np.log(FACTORS / USUAL_FACTOR) / FACTOR_WIDTH
    return np.asarray(np.log(odds[belief.kind] / same_kind) - 0.5 * far**2)


def posterior(
    rows: Rows, error: float, odds: Mapping[str, float], groups: NDArray[np.str_], *, skewed: bool
) -> Posterior:
    """The average over all beliefs and factors; `odds` are each kind's before any row."""
    parts = [_Part(rows, belief, error, odds, groups, skewed) for belief in BELIEFS]
    logs = np.array([part.evidence for part in parts])
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    shared = 1.0 - OF_THE_DAY if rows.days_differ else 1.0
    pulls = [weight @ part.pulls for weight, part in zip(weights, parts, strict=True)]
    by_scale = np.sum([part.belief.scale * pull for part, pull in zip(parts, pulls, strict=True)], axis=0)
    by_similar = np.sum([part.belief.similar * pull for part, pull in zip(parts, pulls, strict=True)], axis=0)
    moves = np.sum([weight.sum() * part.x for weight, part in zip(weights, parts, strict=True)], axis=0)
    mean = np.concatenate([[shared * float(by_scale.sum())], moves])
    covariance = -np.outer(mean, mean)
    for weight, part in zip(weights, parts, strict=True):
        means = part.means(shared)
        covariance += float(weight @ part.variances) * part.covariance + (means.T * weight) @ means
    kinds = dict.fromkeys((part.belief.kind for part in parts), 0.0)
    for weight, part in zip(weights, parts, strict=True):
        kinds[part.belief.kind] += float(weight.sum())
    return Posterior(
        scale=float(mean[0]),
        day=(1.0 - shared) * (rows.same_day @ by_scale),
        moves=mean[1:],
        similar=by_similar,
        covariance=covariance,
        kept=_kept(parts, weights),
        error=float(
            np.sqrt(sum(weight @ part.variances * part.apart for weight, part in zip(weights, parts, strict=True)))
        ),
        kinds=kinds,
        left_out=np.sum([weight @ part.left_out for weight, part in zip(weights, parts, strict=True)], axis=0),
    )


def _kept(parts: Sequence[_Part], weights: Floats) -> Floats:
    """Share of the prior variance of (scale, moves) that is left, over the beliefs in which each may move."""
    left, prior = np.zeros(len(parts[0].prior)), np.zeros(len(parts[0].prior))
    for weight, part in zip(weights, parts, strict=True):
        may = part.prior > 0
        left[may] += weight.sum() * np.diagonal(part.covariance)[may] / part.prior[may]
        prior[may] += weight.sum()
    return left / np.maximum(prior, 1e-300)


class _Part:
    """One belief under all factors: all that is of shape (factors, ...) follows from one decomposition of K."""

    def __init__(
        self,
        rows: Rows,
        belief: Belief,
        error: float,
        odds: Mapping[str, float],
        groups: NDArray[np.str_],
        skewed: bool,
    ) -> None:
        count = len(rows.residuals)
        self.belief, self.of_moves = belief, belief.efficiencies / USUAL_ERROR**2
        self.variances = variances(error)
        alone = covariance_alone(belief, rows)
        total = alone + self.of_moves * (rows.jacobian @ rows.jacobian.T)
        inverse = np.linalg.inv(total)
        expected = np.full(count, belief.own if skewed else 0.0)
        # (factors, n): what is to be explained where efficiencies stand, and the inverse of the other covariance times
        # it, which at the most likely efficiencies is K^-1 of what is to be explained where they have not moved
        self.x, residuals = (rows.x, rows.residuals) if belief.efficiencies else (np.zeros_like(rows.x), rows.unmoved)
        target = residuals[None, :] - self.variances[:, None] * expected
        self.pulls = np.linalg.solve(alone, target.T).T
        held = float(self.x @ self.x) / self.of_moves if belief.efficiencies else 0.0
        self.evidence = (
            chances(belief, odds)
            - 0.5 * (np.sum(self.pulls * target, axis=1) + held) / self.variances
            - 0.5 * np.linalg.slogdet(total)[1]
            - 0.5 * count * np.log(self.variances)
        )
        self.prior = np.array([belief.scale, *[self.of_moves] * rows.jacobian.shape[1]])
        self.across = np.vstack([np.full(count, belief.scale), self.of_moves * rows.jacobian.T])
        self.covariance = np.diag(self.prior) - self.across @ inverse @ self.across.T
        # what an unseen run differs by, as each row does from what all others say of it
        self.apart = float(np.mean(1.0 / np.diagonal(inverse)))
        self.left_out = np.empty_like(target)
        for group in set(groups.tolist()):
            inside = groups == group
            alone = np.linalg.solve(inverse[np.ix_(inside, inside)], self.pulls[:, inside].T).T
            self.left_out[:, inside] = alone + self.variances[:, None] * expected[inside]

    def means(self, shared: float) -> Floats:
        """(scale, moves) under each factor, shape (factors, 1 + efficiencies)."""
        scales = shared * self.belief.scale * self.pulls.sum(axis=1)
        return np.hstack([scales[:, None], np.tile(self.x, (len(scales), 1))])
