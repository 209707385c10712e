"""How likely efficiencies and what they leave of the residuals are together, and where they are most likely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trimaran.cost.fit.posterior import BELIEFS, USUAL_ERROR, Belief, Rows, chances, covariance_alone, variances
from trimaran.cost.fit.solve import Solution, damped, descend
from trimaran.cost.grid import Floats

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

    def _logs(self, residuals: Floats, x: Floats) -> Floats:
        """Log densities, shape (beliefs, factors), of log residuals (measured over predicted) and efficiencies x."""
        found = []
        for part in self._parts:
            target = residuals[None, :] - self._variances[:, None] * part.expected
            squares = np.sum((target @ part.inverse) * target, axis=1) + part.held * float(x @ x)
            found.append(part.constants - 0.5 * squares / self._variances)
        return np.array(found)

    def likelihood(self, at: Solution) -> float:
        """Log density, over all beliefs and factors."""
        return float(np.logaddexp.reduce(self._logs(-at.residuals, at.x), axis=None))

    def step(self, at: Solution, damping: float) -> Floats:
        """The move of the efficiencies that is most likely where predictions are linear in them, shape (k,)."""
        residuals, x, jacobian = -at.residuals, at.x, at.jacobian
        logs = self._logs(residuals, x)
        weights = np.exp(logs - logs.max()) / self._variances
        normal, gradient = np.zeros((len(x), len(x))), np.zeros(len(x))
        for weight, part in zip(weights, self._parts, strict=True):
            across = jacobian.T @ part.inverse
            target = float(weight.sum()) * residuals - float(weight @ self._variances) * part.expected
            normal += float(weight.sum()) * (across @ jacobian + part.held * np.eye(len(x)))
            gradient += across @ target - float(weight.sum()) * part.held * x
        return np.asarray(np.linalg.solve(damped(normal, damping), gradient))


def most_likely(at: Solution, joint: Joint) -> Solution:
    """Residuals and derivatives at the most likely efficiencies that are reached from those of `at`."""
    return descend(at, lambda there: -joint.likelihood(there), joint.step, FURTHEST)
