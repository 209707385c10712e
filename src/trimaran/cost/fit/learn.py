"""Learning from a few rows: from what is known of a cluster and stack, and no further than the rows can tell.

Three beliefs compete to explain the log residuals r of the rows under the start: it stands as it is; one scale and a
state of each day were off; or single efficiencies were off as well. Each is a Gaussian prior on parameters x (in
widths) with derivatives J, so that r ~ N(0, J J^T + sigma^2 I), with sigma unknown as well (Rasmussen and Williams,
Gaussian Processes for Machine Learning, section 5.4). Few rows are believed by their marginal likelihood, many by how
well each of them is predicted by the others (eq. 5.12), the start among them. The parameters of the winner are then
solved for as in `trimaran.cost.fit.solve`, without linearisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimaran.cost.calibration import Calibration
from trimaran.cost.fit.solve import (
    CPU_MEMORY_WIDTHS,
    CPU_WIDTHS,
    MAX_STEP,
    MEMORY_WIDTHS,
    TIME_WIDTHS,
    Observation,
    Problem,
    Solution,
    memory_problem,
    time_problem,
)
from trimaran.cost.grid import Floats
from trimaran.nouns.noun import TrimaranError

# What a fit to this machine's earlier rows leaves open, of what is open where nothing was measured.
NARROWED = 0.5
# Width (log) of the prior on the residuals' own standard deviation.
NOISE_WIDTH = 0.5
NOISES = np.geomspace(0.01, 0.5, 14)
# Log odds against a belief before any row: that a scale is off, that efficiencies are off as well.
ODDS_AGAINST = (0.0, 0.5, 1.5)
# From so many rows on, each predicted by the others, rows left out say more than the marginal likelihood does: the
# model errs alike on alike layouts, which a likelihood of independent errors does not know.
MANY_ROWS = 6
# A belief of more parameters must predict rows left out better by this share: of a few rows' errors, less is chance.
WORTH_A_PARAMETER = 0.1
# Rows show a parameter when they take a tenth off its width, and cannot tell two apart that share a correlation of 0.7.
SHOWN, TANGLED = 0.9, 0.7


@dataclass(frozen=True)
class Quantity:
    """Time or memory: its scale, its efficiencies and their widths, on GPUs and on CPUs, and how it is predicted.

    `noise` is what rows differ by from a start that was fitted to nothing of theirs, once its scale is right;
    `least_noise` what they differ by from one fitted to other models and days of the same machine.
    """

    name: str
    scale: str
    error: str
    scale_width: tuple[float, float]
    widths: tuple[dict[str, float], dict[str, float]]
    noise: tuple[float, float]
    least_noise: float
    problem: Callable[[Sequence[Observation], Calibration], Problem | None]


# A machine holds its datasheet to a fifth (time_error of a prior), and the rest of the model is off by half of that;
# what a CPU's libraries reach and keep is known less well.
TIME = Quantity(
    "time", "time_scale", "time_error", (0.2, 0.2), (TIME_WIDTHS, CPU_WIDTHS), (0.10, 0.15), 0.05, time_problem
)
# Allocators, fragmentation and what a tool counts: a fifth of all memory; a CPU's node shows its system as well.
MEMORY = Quantity(
    "memory", "memory_scale", "mem_error", (0.2, 0.4), ({**MEMORY_WIDTHS, "activation_scale": 0.2}, CPU_MEMORY_WIDTHS),
    (0.08, 0.12), 0.04, memory_problem,
)  # fmt: skip


@dataclass(frozen=True)
class Move:
    """What rows taught of one parameter: its value before and after, and how sure that is (log, 1 sigma)."""

    name: str
    before: float
    after: float
    sigma: float


@dataclass(frozen=True)
class Lesson:
    """What rows taught of time or memory.

    `belief` is `nothing`, `scale` or `efficiencies`; `unseen` are the parameters that the rows do not show, `tangled`
    the pairs that they cannot tell apart. `error` is what unseen rows differ by (1 sigma, log), `left_out` the log
    residuals of the rows, each group of them predicted by the others.
    """

    quantity: Quantity
    belief: str
    moves: tuple[Move, ...]
    unseen: tuple[str, ...]
    tangled: tuple[tuple[str, str], ...]
    error: float
    left_out: tuple[float, ...]


@dataclass(frozen=True)
class _Belief:
    """One explanation of the residuals: its columns, log evidence, noise, and the rows as the others predict them."""

    columns: list[int]
    evidence: float
    noise: float
    mean: Floats
    variance: Floats
    left_out: Floats


def learn(
    observations: Sequence[Observation], start: Calibration | None = None, groups: Sequence[str] | None = None
) -> tuple[Calibration, tuple[Lesson, ...]]:
    """What the observations, all of one cluster and stack, add to `start`; and what they taught.

    `start` is the first observation's own calibration unless it is given: the shipped one of its cluster and stack, or
    the prior. Repeats of one configuration on one day count as their mean. `groups` are left out together for a
    lesson's `left_out`. Raises TrimaranError when no row has a time or a memory.
    """
    if not any(seen.sec_per_it or seen.mem_gib for seen in observations):
        raise TrimaranError(f"fit: none of {len(observations)} rows has sec_per_it or mem_gib: nothing to fit to")
    found = start or observations[0].case.calibration
    distinct, names = averaged(observations, groups or [str(i) for i in range(len(observations))])
    lessons = []
    for quantity in (TIME, MEMORY):
        problem = quantity.problem(distinct, found)
        if problem is not None:
            update, lesson = _learn(quantity, problem, found, np.array([names[i] for i in problem.rows]))
            found = found.model_copy(update={**update, quantity.error: float(f"{lesson.error:.4g}")})
            lessons.append(lesson)
    return found.model_copy(update={"rows": len(observations), "origin": "fit"}), tuple(lessons)


def averaged(observations: Sequence[Observation], groups: Sequence[str]) -> tuple[list[Observation], list[str]]:
    """Observations with repeats of one configuration on one day as their mean, and the group of each."""
    repeats: dict[tuple[str, ...], list[int]] = {}
    for index, seen in enumerate(observations):
        case = seen.case
        nouns = (case.workload, case.cluster, case.stack, seen.layout)
        repeats.setdefault((*(noun.model_dump_json() for noun in nouns), seen.day), []).append(index)
    out = []
    for same in repeats.values():
        seconds = [value for i in same if (value := observations[i].sec_per_it)]
        gib = [value for i in same if (value := observations[i].mem_gib)]
        out.append(replace(observations[same[0]], sec_per_it=_mean(seconds), mem_gib=_mean(gib)))
    return out, [groups[same[0]] for same in repeats.values()]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _learn(
    quantity: Quantity, problem: Problem, start: Calibration, groups: np.ndarray[tuple[int], np.dtype[np.str_]]
) -> tuple[dict[str, object], Lesson]:
    on_cpu = problem.on_cpu
    fitted = getattr(start, quantity.error) != Calibration.model_fields[quantity.error].default
    share = NARROWED if fitted else 1.0
    efficiencies = {name: share * width for name, width in quantity.widths[on_cpu].items()}
    widths = {quantity.scale: share * quantity.scale_width[on_cpu], **efficiencies}
    noise = max(getattr(start, quantity.error), quantity.least_noise) if fitted else quantity.noise[on_cpu]
    whole = replace(problem, base=start, widths=widths)
    at = whole.linearise(np.zeros(whole.free))
    days = list(range(len(widths), whole.free))
    beliefs = [
        _weigh(-at.residuals, at.jacobian, columns, noise)
        for columns in ([], [0, *days], list(range(whole.free)))
    ]  # fmt: skip
    best = _best(beliefs, at.residuals)
    chosen = beliefs[best]
    evidence = np.array([belief.evidence - odds for belief, odds in zip(beliefs, ODDS_AGAINST, strict=True)])
    weights = np.exp(evidence - evidence.max())
    spread = [np.mean(belief.variance + (belief.mean - chosen.mean) ** 2) for belief in beliefs]
    error = float(np.sqrt(np.average(spread, weights=weights)))
    kept = dict(list(widths.items())[: (0, 1, len(widths))[best]])
    solved = replace(whole, widths=kept, noise=chosen.noise)
    if not kept:
        return {}, Lesson(quantity, "nothing", (), (), (), error, tuple(at.residuals.tolist()))
    linear = Solution(solved, np.zeros(solved.free), at.residuals, at.jacobian[:, chosen.columns])
    near = solved.step(linear, np.ones(len(at.residuals), dtype=np.bool_)).x
    solution = solved.descend(near if np.abs(near).max() <= MAX_STEP else linear.x)
    lesson = _told(quantity, ("nothing", "scale", "efficiencies")[best], solution, error, groups)
    update: dict[str, object] = dict(solved.values(solution.x))
    if solved.free > len(kept):
        update["days"] = solved.day_scales(solution.x)
    return update, lesson


def _weigh(target: Floats, jacobian: Floats, columns: list[int], usual: float) -> _Belief:
    """How well parameters of the `columns` explain the target, over all noises that it may have.

    With J = U s V^T the covariance is U (s^2 + sigma^2) U^T + sigma^2 (I - U U^T).
    """
    rows = len(target)
    u, s, _ = (
        np.linalg.svd(jacobian[:, columns], full_matrices=False)
        if columns
        else (np.zeros((rows, 0)), *[np.zeros(0)] * 2)
    )
    along = u.T @ target
    evidence, means, variances, left_out = [], [], [], []
    for sigma in NOISES:
        both = s**2 + sigma**2
        fitted = u @ (s**2 / both * along)
        leverage = np.einsum("ij,j,ij->i", u, s**2 / both, u)
        squares = float(np.sum(along**2 / both) + (target @ target - along @ along) / sigma**2)
        volume = float(np.sum(np.log(both)) + (rows - len(s)) * np.log(sigma**2))
        evidence.append(-0.5 * (squares + volume) - 0.5 * (np.log(sigma / usual) / NOISE_WIDTH) ** 2)
        means.append(fitted)
        variances.append(sigma**2 * (1.0 + leverage))
        left_out.append((target - fitted) / np.maximum(1.0 - leverage, 1e-9))
    logs = np.array(evidence)
    weights = np.exp(logs - logs.max())
    mean = np.average(means, axis=0, weights=weights)
    variance = np.average(np.array(variances) + (np.array(means) - mean) ** 2, axis=0, weights=weights)
    return _Belief(
        columns,
        float(logs.max() + np.log(weights.sum())),
        float(np.average(NOISES, weights=weights)),
        mean,
        variance,
        np.average(np.abs(left_out), axis=0, weights=weights),
    )


def _best(beliefs: Sequence[_Belief], residuals: Floats) -> int:
    """The belief to act on."""
    if len(residuals) < MANY_ROWS:
        return int(np.argmax([belief.evidence - odds for belief, odds in zip(beliefs, ODDS_AGAINST, strict=True)]))
    missed = [float(np.mean(np.abs(residuals))), *(float(np.mean(belief.left_out)) for belief in beliefs[1:])]
    return int(np.argmin([error * (1.0 + WORTH_A_PARAMETER * i) for i, error in enumerate(missed)]))


def _told(
    quantity: Quantity,
    belief: str,
    solution: Solution,
    error: float,
    groups: np.ndarray[tuple[int], np.dtype[np.str_]],
) -> Lesson:
    """What a solution says of each of its parameters, and its rows as their other groups predict them."""
    problem = solution.problem
    jacobian = solution.jacobian / problem.noise
    covariance = np.linalg.inv(jacobian.T @ jacobian + np.eye(len(solution.x)))
    sigmas = np.sqrt(np.diagonal(covariance))
    after = problem.values(solution.x)
    names = list(problem.widths)
    seen = [i for i in range(len(names)) if sigmas[i] < SHOWN]
    moves = [
        Move(names[i], getattr(problem.base, names[i]), after[names[i]], float(sigmas[i]) * problem.widths[names[i]])
        for i in seen
    ]
    correlation = covariance / np.outer(sigmas, sigmas)
    tangled = [(names[i], names[j]) for i in seen for j in seen if i < j and abs(correlation[i, j]) > TANGLED]
    left_out = np.empty(len(groups))
    for group in set(groups.tolist()):
        without = problem.step(solution, groups != group).x
        inside = groups == group
        left_out[inside] = (solution.residuals + solution.jacobian @ (without - solution.x))[inside]
    unseen = tuple(names[i] for i in range(len(names)) if i not in seen)
    return Lesson(quantity, belief, tuple(moves), unseen, tuple(tangled), error, tuple(left_out.tolist()))
