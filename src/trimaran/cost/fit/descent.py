"""Where efficiencies are most likely, given the rows: a descent that holds where predictions bend.

An efficiency moves predictions far from linearly: a product that waits for memory gains nothing by faster arithmetic.
So each step of Levenberg and Marquardt (Nocedal and Wright, Numerical Optimization, section 10.3) is taken only where
it makes the residuals of the real predictions, and the efficiencies, more likely together. Derivatives learn from each
step (Broyden's update, ibid., eq. 11.15) and are taken anew where one does not gain by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from trimaran.cost.fit.posterior import BELIEFS, USUAL_ERROR, Belief, Rows, chances, covariance_alone, variances
from trimaran.cost.fit.solve import Solution
from trimaran.cost.grid import Floats

# Steps at most until no efficiency moves by this part of its width, or all of them gain less than this (log density).
ITERATIONS, SETTLED, GAIN = 40, 0.02, 0.02
# Damping after a step that gained, and after one that did not.
LEAST_DAMPING, LESS, MORE = 1e-3, 5.0, 5.0
# Widths that an efficiency can be moved by.
FURTHEST = 4.0


@dataclass(frozen=True)
class _Believed:
    """A belief in which efficiencies move, under all factors: `inverse` is that of K without efficiencies, (n, n).

    `held` is the weight of the squares of efficiencies, in widths, against that of the rows.
    """

    inverse: Floats
    expected: float
    held: float
    constants: Floats


class Joint:
    """How likely the residuals of n rows and k efficiencies are together, over all beliefs in which these move."""

    def __init__(self, rows: Rows, error: float, odds: Mapping[str, float], *, skewed: bool) -> None:
        self._variances = variances(error)
        self._parts = [self._believed(belief, rows, odds, skewed) for belief in BELIEFS if belief.efficiencies]

    def _believed(self, belief: Belief, rows: Rows, odds: Mapping[str, float], skewed: bool) -> _Believed:
        count, free = rows.jacobian.shape
        alone = covariance_alone(belief, rows)
        held = USUAL_ERROR**2 / belief.efficiencies
        constants = (
            chances(belief, odds)
            - 0.5 * np.linalg.slogdet(alone)[1]
            - 0.5 * (count + free) * np.log(self._variances)
            + 0.5 * free * np.log(held)
        )
        return _Believed(np.linalg.inv(alone), belief.own if skewed else 0.0, held, constants)

    def logs(self, residuals: Floats, x: Floats) -> Floats:
        """Log densities, shape (beliefs, factors), of log residuals (measured over predicted) and efficiencies x."""
        found = []
        for part in self._parts:
            target = residuals[None, :] - self._variances[:, None] * part.expected
            squares = np.sum((target @ part.inverse) * target, axis=1) + part.held * float(x @ x)
            found.append(part.constants - 0.5 * squares / self._variances)
        return np.array(found)

    def likelihood(self, residuals: Floats, x: Floats) -> float:
        """Log density, over all beliefs and factors."""
        return float(np.logaddexp.reduce(self.logs(residuals, x), axis=None))

    def step(self, residuals: Floats, x: Floats, jacobian: Floats, damping: float) -> Floats:
        """The move of the efficiencies that is most likely where predictions are linear in them, shape (k,).

        `damping` is what is added to each curvature, as a part of it (Nocedal and Wright, section 10.3).
        """
        logs = self.logs(residuals, x)
        weights = np.exp(logs - logs.max()) / self._variances
        normal, gradient = np.zeros((len(x), len(x))), np.zeros(len(x))
        for weight, part in zip(weights, self._parts, strict=True):
            across = jacobian.T @ part.inverse
            target = float(weight.sum()) * residuals - float(weight @ self._variances) * part.expected
            normal += float(weight.sum()) * (across @ jacobian + part.held * np.eye(len(x)))
            gradient += across @ target - float(weight.sum()) * part.held * x
        return np.asarray(np.linalg.solve(normal + damping * np.diag(np.diagonal(normal)), gradient))


def most_likely(at: Solution, joint: Joint) -> Solution:
    """Residuals and derivatives at the most likely efficiencies that are reached from those of `at`."""
    likely, fresh, damping = joint.likelihood(-at.residuals, at.x), True, LEAST_DAMPING
    for _ in range(ITERATIONS):
        step = joint.step(-at.residuals, at.x, at.jacobian, damping)
        move = np.clip(at.x + step, -FURTHEST, FURTHEST) - at.x
        x = at.x + move
        residuals = at.problem.residuals(x)
        gain = joint.likelihood(-residuals, x) - likely
        if gain > 0.0:
            missed = residuals - at.residuals - at.jacobian @ move
            learned = at.jacobian + np.outer(missed, move) / float(move @ move)
            at, fresh = replace(at, x=x, residuals=residuals, jacobian=learned), False
            likely, damping = likely + gain, max(damping / LESS, LEAST_DAMPING)
        elif not fresh:
            at, fresh = at.problem.linearise(at.x), True
            continue
        else:
            damping *= MORE
        if np.abs(move).max() < SETTLED or 0.0 < gain < GAIN:
            break
    return at
