"""Learning from a few rows: from what is known of a cluster and stack, and no further than the rows can tell.

What the rows' residuals under the start have in common is told by `trimaran.cost.fit.posterior`: one scale and the
state of each day, single efficiencies, and what runs that resemble each other share. The last is kept as the measured
runs themselves (`Calibration.similar`), so that a prediction is moved where the rows speak of it, and the start
stands elsewhere. Predictions are not linear in efficiencies: where these have moved to is found by
`trimaran.cost.fit.joint`, and what else the rows share is what they leave of the residuals there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trimaran.cost.calibration import Calibration
from trimaran.cost.fit.joint import Joint, most_likely
from trimaran.cost.fit.posterior import Posterior, Rows, posterior
from trimaran.cost.fit.solve import (
    CPU_WIDTHS,
    MEMORY_WIDTHS,
    TIME_WIDTHS,
    Observation,
    Problem,
    memory_problem,
    time_problem,
)
from trimaran.cost.grid import Floats
from trimaran.cost.likeness import Places, Similar, fewer, likeness
from trimaran.nouns.noun import TrimaranError

# Measured runs that a calibration keeps at most.
MOST_SIMILAR = 64
# A run that would move its likes by less is not kept.
LEAST_WEIGHT = 0.0005
# Rows show a parameter when they take a fifth off its variance, and cannot tell two apart that share a correlation of
# 0.7.
SHOWN, TANGLED = 0.8, 0.7


@dataclass(frozen=True)
class Quantity:
    """Time or memory: its scale and error in a calibration, its efficiencies on GPUs and CPUs, how it is predicted.

    `odds` are those of what a start's errors have in common, before any row, where it was fitted to nothing and where
    it was fitted to this machine's other rows. `error` of a start of the first kind is `usual_error`. `alike` says
    whether runs that resemble each other err alike.
    """

    name: str
    scale: str
    error: str
    usual_error: float
    widths: tuple[dict[str, float], dict[str, float]]
    odds: tuple[dict[str, float], dict[str, float]]
    skewed: bool
    alike: bool
    problem: Callable[[Sequence[Observation], Calibration], Problem | None]


def _odds(alone: float) -> dict[str, float]:
    """So many to one that rows far from the measured ones share nothing with them."""
    return {"similar runs": alone * 2 / 3, "each run": alone / 3, "one scale": 1.0, "efficiencies": 1.0}


# Most starts are right on the whole, and wrong of some runs: of tables' errors under their starts, what all rows share
# is a tenth (of a start from a datasheet) to nothing (of one that was fitted), what similar ones share a third.
TIME = Quantity(
    "time",
    "time_scale",
    "time_error",
    0.2,
    (TIME_WIDTHS, CPU_WIDTHS),
    (_odds(3.0), _odds(6.0)),
    True,
    True,
    time_problem,
)
# Allocators and what a tool counts are alike in all rows of a table. Memory is counted: what errors of similar runs
# share would move neighbours past each other that differ by less.
_FRAGMENTED = {**MEMORY_WIDTHS, "activation_scale": 0.2}
MEMORY = Quantity(
    "memory", "memory_scale", "mem_error", 0.2, (_FRAGMENTED, _FRAGMENTED), (_odds(1.0), _odds(1.0)), False, False,
    memory_problem,
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

    `kinds` says how likely it is that the errors of the start are of each kind: each run's own, shared by similar
    runs, one scale, or single efficiencies. `unseen` are the parameters that the rows do not show, `tangled` the pairs
    that they cannot tell apart; `similar` by how much (log) a measured run itself is moved at most for its likes.
    `error` is what unseen rows differ by (1 sigma, log), `left_out` the log residuals of the rows, each group of them
    predicted by the others.
    """

    quantity: Quantity
    kinds: Mapping[str, float]
    moves: tuple[Move, ...]
    unseen: tuple[str, ...]
    tangled: tuple[tuple[str, str], ...]
    similar: float
    error: float
    left_out: tuple[float, ...]


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
    known = start or observations[0].case.calibration
    distinct, names = averaged(observations, groups or [str(i) for i in range(len(observations))])
    runs = [_similar(seen) for seen in distinct]
    found, lessons, similar = known, [], known.similar
    for quantity in (TIME, MEMORY):
        problem = quantity.problem(distinct, known)
        if problem is None:
            continue
        update, weights, lesson = _learn(
            quantity, problem, known, [runs[i] for i in problem.rows], np.array([names[i] for i in problem.rows])
        )
        found = found.model_copy(update={**update, quantity.error: float(f"{lesson.error:.4g}")})
        if quantity.alike:
            weighed = zip(problem.rows, weights.tolist(), strict=True)
            told = [
                runs[i].model_copy(update={"time": float(f"{weight:.4g}")})
                for i, weight in weighed
                if abs(weight) >= LEAST_WEIGHT
            ]
            similar = fewer((*similar, *told), MOST_SIMILAR)
        lessons.append(lesson)
    return found.model_copy(update={"rows": len(observations), "origin": "fit", "similar": similar}), tuple(lessons)


def _similar(seen: Observation) -> Similar:
    workload, model = seen.case.workload, seen.case.model
    return Similar(
        layout=seen.layout.label(), hidden=model.hidden, layers=model.layers, heads=model.heads,
        seq_len=workload.seq_len, global_batch=workload.global_batch, time=0.0,
    )  # fmt: skip


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
    quantity: Quantity, problem: Problem, start: Calibration, runs: Sequence[Similar], groups: NDArray[np.str_]
) -> tuple[dict[str, object], Floats, Lesson]:
    """The parameters of a calibration that change, the weight of each run, and the lesson."""
    stated = getattr(start, quantity.error)
    fitted = stated != Calibration.model_fields[quantity.error].default
    at = Places(tuple(runs)).at
    alike, days = likeness(at, at) if quantity.alike else np.eye(len(runs)), problem.days
    problem = _beyond_days(problem, start)
    whole = replace(problem, base=start, widths=quantity.widths[problem.on_cpu], days=np.zeros_like(days))
    error = stated if fitted else quantity.usual_error
    together = days[:, None] == days[None, :]
    unmoved = whole.linearise(np.zeros(len(whole.widths)))
    rows = Rows(-unmoved.residuals, -unmoved.residuals, unmoved.x, unmoved.jacobian, alike, together)
    moved = most_likely(unmoved, Joint(rows, error, quantity.odds[fitted], skewed=quantity.skewed))
    rows = replace(rows, residuals=-moved.residuals, x=moved.x, jacobian=moved.jacobian)
    taught = posterior(rows, error, quantity.odds[fitted], groups, skewed=quantity.skewed)
    if not quantity.alike:
        taught = replace(taught, similar=np.zeros(len(runs)))
    before = {quantity.scale: getattr(start, quantity.scale), **{name: getattr(start, name) for name in whole.widths}}
    after = {quantity.scale: before[quantity.scale] * float(np.exp(taught.scale)), **whole.values(taught.moves)}
    update: dict[str, object] = dict(after)
    if rows.days_differ:
        update["days"] = start.days | {
            name: start.days.get(name, 1.0) * float(np.exp(taught.day[days == day][0]))
            for day, name in enumerate(problem.day_names)
            if name
        }
    return (
        update,
        taught.similar,
        _told(quantity, whole, taught, before, after, float(np.abs(alike @ taught.similar).max())),
    )


def _beyond_days(problem: Problem, start: Calibration) -> Problem:
    """The problem with what the start knows of the rows' days taken off what was measured."""
    if not start.days or not problem.day_names:
        return problem
    known = np.log([start.days.get(name, 1.0) for name in problem.day_names])
    return replace(problem, measured=problem.measured - known[problem.days])


def _told(
    quantity: Quantity,
    problem: Problem,
    taught: Posterior,
    before: Mapping[str, float],
    after: Mapping[str, float],
    similar: float,
) -> Lesson:
    """What the rows say of each parameter, in the calibration's units."""
    names, widths = list(before), [1.0, *problem.widths.values()]
    sigmas = np.sqrt(np.maximum(np.diagonal(taught.covariance), 0.0))
    seen = [i for i in range(len(names)) if taught.kept[i] < SHOWN]
    moves = [Move(names[i], before[names[i]], after[names[i]], float(sigmas[i]) * widths[i]) for i in seen]
    correlation = taught.covariance / np.maximum(np.outer(sigmas, sigmas), 1e-300)
    tangled = [(names[i], names[j]) for i in seen for j in seen if i < j and abs(correlation[i, j]) > TANGLED]
    unseen = tuple(names[i] for i in range(len(names)) if i not in seen)
    left_out = tuple(taught.left_out.tolist())
    return Lesson(quantity, taught.kinds, tuple(moves), unseen, tuple(tangled), similar, taught.error, left_out)
