"""Fitting a calibration to measured rows: few parameters, each held to its prior, robustly, in log time.

The fit minimises  sum soft_l1(log(predicted / measured) / NOISE) + sum ((log p - log prior) / width)^2
over the efficiencies p: with no rows the prior stands, and every row sharpens it. Days may differ
by a factor of their own, since machines change between dates (document 004 says when).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from trimaran.cost.calibration import Calibration, prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import memory_many, time_many
from trimaran.cost.grid import Bools, Floats, LayoutGrid
from trimaran.layout.layout import Layout
from trimaran.nouns.noun import TrimaranError

# Widths of the priors, in log: how far off a datasheet or the literature may well be.
TIME_WIDTHS: dict[str, float] = {
    "gemm": 0.15,
    "gemm_plain": 0.1,
    "attention": 0.4,
    "attention_pow2": 0.5,
    "unaligned": 0.5,
    "memory": 0.25,
    "op_us": 0.6,
    "intra_bandwidth": 0.4,
    "inter_bandwidth": 0.9,
    "send_bandwidth": 0.6,
    "collective_us": 1.2,
    "micro_batch_ms": 1.0,
    "iteration_ms": 1.0,
}
# What a CPU's libraries reach of its datasheet is known far less well.
CPU_WIDTHS: dict[str, float] = {
    **TIME_WIDTHS,
    "gemm": 0.4,
    "attention": 0.6,
    "memory": 0.5,
    "intra_bandwidth": 1.0,
    "inter_bandwidth": 1.0,
    "send_bandwidth": 1.0,
    "random_cycles": 0.5,
    "fresh_gb_s": 0.7,
}
MEMORY_WIDTHS: dict[str, float] = {"activation_scale": 0.05, "buffer_gib": 1.0}
TIME_NOISE, MEMORY_NOISE, DAY_WIDTH = 0.03, 0.04, 0.08
# A normal distribution's standard deviation over its mean absolute deviation.
MEAN_TO_SIGMA = float(np.sqrt(np.pi / 2))
STEP = 0.02
# Steps of a descent at most, until no parameter moves by this part of its width, or all of them gain less than this.
MOST_STEPS, SETTLED, GAIN = 40, 0.02, 0.02
# Damping after a step that gained, and after one that did not.
LEAST_DAMPING, LESS, MORE = 1e-3, 5.0, 5.0


@dataclass(frozen=True)
class Observation:
    """One measured run: what was run, and what it showed. `day` groups rows that share a time scale."""

    case: Case
    layout: Layout
    sec_per_it: float | None = None
    mem_gib: float | None = None
    day: str = ""


@dataclass
class Batch:
    """Observations of one workload, cluster and stack (global batch apart), ready to be predicted at once."""

    case: Case
    grid: LayoutGrid
    index: list[int] = field(default_factory=list)


def batches(observations: Sequence[Observation]) -> list[Batch]:
    """Observations by what they share; each batch remembers which rows it holds."""
    rows: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for index, seen in enumerate(observations):
        case = seen.case
        workload = case.workload.model_copy(update={"global_batch": 1, "ramp_up": None})
        rows[workload.model_dump_json(), case.cluster.model_dump_json(), case.stack.model_dump_json()].append(index)
    out = []
    for members in rows.values():
        case = observations[members[0]].case
        grid = LayoutGrid.from_layouts([observations[i].layout for i in members], case.workload, case.stack)
        grid = grid.with_global_batch([observations[i].case.workload.global_batch for i in members])
        out.append(Batch(case, grid, members))
    return out


def predict_times(prepared: Iterable[Batch], count: int, calibration: Calibration) -> Floats:
    """Seconds per iteration of all rows, in their order."""
    out = np.empty(count)
    for batch in prepared:
        out[batch.index] = time_many(batch.case.calibrated(calibration), batch.grid)
    return out


def predict_memory(prepared: Iterable[Batch], count: int, calibration: Calibration) -> Floats:
    """GiB as the stack's own tool reports it, of all rows, in their order."""
    out = np.empty(count)
    for batch in prepared:
        out[batch.index] = memory_many(batch.case.calibrated(calibration), batch.grid)[1]
    return out


def calibrate(observations: Sequence[Observation]) -> Calibration:
    """The calibration that the observations, all of one stack, and the bare prior agree on.

    It is what a whole published table teaches of a cluster that nothing else is known of; few rows are learned from
    by `trimaran.cost.fit.learn`. The prior is the one of the first observation's cluster and stack.
    Raises TrimaranError when no row has a time or a memory.
    """
    if not any(seen.sec_per_it or seen.mem_gib for seen in observations):
        raise TrimaranError(f"fit: none of {len(observations)} rows has sec_per_it or mem_gib: nothing to fit to")
    found = prior(observations[0].case.cluster, observations[0].case.stack)
    for problem in (time_problem(observations, found), memory_problem(observations, found)):
        if problem is not None:
            found = problem.solve().apply(found)
    return found.model_copy(update={"rows": len(observations), "origin": "fit"})


def leave_out(observations: Sequence[Observation], groups: Sequence[str]) -> dict[str, Calibration]:
    """A calibration for each group, fitted to the rows of all other groups.

    Each is solved from the fit to all rows, with that fit's derivatives: one Gauss-Newton step from an optimum
    that a group of a few rows moves little.
    """
    found = prior(observations[0].case.cluster, observations[0].case.stack)
    out = dict.fromkeys(groups, found)
    for make in (time_problem, memory_problem):
        problem = make(observations, found)
        if problem is None:
            continue
        whole = problem.solve()
        names = np.array([groups[i] for i in problem.rows])
        for group in out:
            moved = whole.x + whole.problem.step(whole, names != group)
            out[group] = replace(whole, x=moved).apply(out[group])
    return out


@dataclass(frozen=True)
class Solution:
    """Where a problem's solver stands: parameters in widths from their priors, residuals, derivatives."""

    problem: Problem
    x: Floats
    residuals: Floats
    jacobian: Floats

    def apply(self, calibration: Calibration) -> Calibration:
        """`calibration` with this solution's efficiencies."""
        return calibration.model_copy(update=self.problem.values(self.x))


@dataclass(frozen=True)
class Problem:
    """Rows to explain by a few efficiencies: log measured values, and how to predict them."""

    base: Calibration
    widths: dict[str, float]
    noise: float
    rows: list[int]
    measured: Floats
    days: NDArray[np.int64]
    predict: Callable[[Calibration], Floats]
    day_names: tuple[str, ...] = ()
    on_cpu: bool = False

    @property
    def free(self) -> int:
        """Parameters: the efficiencies and, where there are several days, the state of each."""
        return len(self.widths) + (int(self.days.max()) + 1 if self.days.any() else 0)

    def values(self, x: Floats) -> dict[str, float]:
        """Parameters that are x widths away from their priors."""
        return {
            name: float(getattr(self.base, name) * np.exp(step * width))
            for (name, width), step in zip(self.widths.items(), x, strict=False)
        }

    def residuals(self, x: Floats) -> Floats:
        """log(predicted / measured) of every row."""
        predicted = np.log(self.predict(self.base.model_copy(update=self.values(x))))
        return np.asarray(predicted + self._day_logs(x) - self.measured)

    def _day_logs(self, x: Floats) -> Floats:
        scales = x[len(self.widths) :]
        return scales[self.days] * DAY_WIDTH if len(scales) else np.zeros(len(self.rows))

    def linearise(self, x: Floats) -> Solution:
        """Residuals and their derivatives at x."""
        here = self.residuals(x)
        columns = []
        for index in range(len(self.widths)):
            moved = x.copy()
            moved[index] += STEP
            columns.append((self.residuals(moved) - here) / STEP)
        columns += [DAY_WIDTH * (self.days == day) for day in range(len(x) - len(self.widths))]
        return Solution(self, x, here, np.stack(columns, axis=1))

    def step(self, at: Solution, use: Bools, damping: float = 0.0) -> Floats:
        """One Gauss-Newton step's move on the rows in `use`, reweighted for soft-l1 until the weights settle."""
        jacobian, residuals = at.jacobian[use] / self.noise, at.residuals[use] / self.noise
        move = np.zeros_like(at.x)
        for _ in range(8):
            weight = 1.0 / np.sqrt(1.0 + (residuals + jacobian @ move) ** 2)
            normal = jacobian.T @ (jacobian * weight[:, None]) + np.eye(len(move))
            move = np.linalg.solve(damped(normal, damping), -jacobian.T @ (weight * residuals) - at.x)
        return move

    def cost(self, at: Solution) -> float:
        """Half of what the fit minimises: soft-l1 of the rows and the squares of the prior's terms."""
        return float(np.sum(np.sqrt(1.0 + (at.residuals / self.noise) ** 2) - 1.0) + 0.5 * np.sum(at.x**2))

    def solve(self) -> Solution:
        """The optimum under the noise that the rows themselves show, and at least the usual one.

        Rows that scatter further than one machine's repeats do say less against the priors.
        """
        at = self._descend(self.linearise(np.zeros(self.free)))
        scatter = float(np.mean(np.abs(at.residuals))) * MEAN_TO_SIGMA
        if scatter <= self.noise:
            return at
        wider = replace(self, noise=scatter)
        return wider._descend(replace(at, problem=wider))

    def _descend(self, at: Solution) -> Solution:
        everything = np.ones(len(self.rows), dtype=np.bool_)
        return descend(at, self.cost, lambda there, damping: self.step(there, everything, damping))


def descend(
    at: Solution, loss: Callable[[Solution], float], step: Callable[[Solution, float], Floats], furthest: float = np.inf
) -> Solution:
    """Where `loss`, a negative log density, is least of what is reached from `at` by Levenberg's and Marquardt's steps.

    Predictions bend: what waits for memory gains nothing by faster arithmetic. So a `step` of Gauss and Newton under
    a damping is taken only where it gains under the real predictions (Nocedal and Wright, Numerical Optimization,
    section 10.3). Derivatives learn from each step (Broyden's update, ibid., eq. 11.15), and are taken anew where one
    does not gain by them, and at the end. No parameter goes further than `furthest` widths.
    """
    least, fresh, damping = loss(at), True, LEAST_DAMPING
    for _ in range(MOST_STEPS):
        move = np.clip(at.x + step(at, damping), -furthest, furthest) - at.x
        residuals = at.problem.residuals(at.x + move)
        there = replace(at, x=at.x + move, residuals=residuals)
        gain = least - loss(there)
        if gain > 0.0:
            missed = residuals - at.residuals - at.jacobian @ move
            learned = at.jacobian + np.outer(missed, move) / float(move @ move)
            at, fresh = replace(there, jacobian=learned), False
            least, damping = least - gain, max(damping / LESS, LEAST_DAMPING)
        elif not fresh:
            at, fresh = at.problem.linearise(at.x), True
            continue
        else:
            damping *= MORE
        if np.abs(move).max() < SETTLED or 0.0 < gain < GAIN:
            break
    return at if fresh else at.problem.linearise(at.x)


def damped(normal: Floats, damping: float) -> Floats:
    """A matrix of normal equations with `damping` of each curvature added to it."""
    return np.asarray(normal + damping * np.diag(np.diagonal(normal)))


def time_problem(observations: Sequence[Observation], base: Calibration) -> Problem | None:
    """The problem of explaining the rows' times, or None where no row has one."""
    rows = [i for i, seen in enumerate(observations) if seen.sec_per_it]
    if not rows:
        return None
    prepared = batches([observations[i] for i in rows])
    days = sorted({observations[i].day for i in rows})
    on_cpu = observations[rows[0]].case.on_cpu
    widths = CPU_WIDTHS if on_cpu else TIME_WIDTHS
    return Problem(
        base, widths, TIME_NOISE, rows,
        np.log([observations[i].sec_per_it or 0.0 for i in rows]),
        np.array([days.index(observations[i].day) for i in rows]),
        lambda calibration: predict_times(prepared, len(rows), calibration),
        tuple(days), on_cpu,
    )  # fmt: skip


def memory_problem(observations: Sequence[Observation], base: Calibration) -> Problem | None:
    """The problem of explaining the rows' memory, or None where no row has one."""
    rows = [i for i, seen in enumerate(observations) if seen.mem_gib]
    if not rows:
        return None
    prepared = batches([observations[i] for i in rows])
    on_cpu = observations[rows[0]].case.on_cpu
    return Problem(
        base, MEMORY_WIDTHS, MEMORY_NOISE, rows,
        np.log([observations[i].mem_gib or 0.0 for i in rows]),
        np.zeros(len(rows), dtype=np.int64),
        lambda calibration: predict_memory(prepared, len(rows), calibration),
        on_cpu=on_cpu,
    )  # fmt: skip
