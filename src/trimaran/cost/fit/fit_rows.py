"""Fitting to rows of a table: which of them count, and how well the fit holds on rows it has not seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimaran.cost.calibration import Calibration, prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import memory_many, time_many
from trimaran.cost.fit.learn import Lesson, learn
from trimaran.cost.fit.solve import MEAN_TO_SIGMA, Observation, batches
from trimaran.cost.grid import Floats
from trimaran.files.row_as_run import subject
from trimaran.files.row_nouns import nouns_of, seconds_of
from trimaran.nouns.columns import FIT_QUALITIES
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError

# A time or memory so many times off the prior is another unit or another row's, not news of the machine.
ABSURD = 100.0
# Fewer groups than this say nothing of rows not seen: the prior's own error then stands.
LEAST_GROUPS = 3
# The error that a belief expects of itself counts as much as so many rows left out.
PRIOR_ROWS = 4


@dataclass(frozen=True)
class Fitted:
    """A calibration, what it rests on, and what the rows taught of time and of memory.

    Errors are mean relative ones on groups left out of the fit, or None where there are too few.
    A group is a comparable group or, where all rows are of one, a layout.
    """

    calibration: Calibration
    rows: int
    groups: int
    time_mape: float | None
    mem_mape: float | None
    skipped: tuple[str, ...]
    lessons: tuple[Lesson, ...] = ()
    notes: tuple[tuple[int, tuple[str, ...]], ...] = ()


def _unfit(row: Measurement) -> str | None:
    """Why a row is none to fit to, if it is none: it did not end well, is doubtful, or has no time and no memory."""
    if row.status != "ok":
        return f"status is {row.status}"
    if row.quality not in FIT_QUALITIES:
        return f"quality is {row.quality}"
    stated = any((row.sec_per_it, row.tokens_per_s_per_gpu, row.tflops, row.mem_gib))
    return None if stated else "it states no time and no memory"


def fit_rows(
    measurements: Iterable[Measurement],
    *,
    cluster: str | None = None,
    stack: str | None = None,
    numbers: Sequence[int] | None = None,
) -> Fitted:
    """Fit to the rows that ran and whose quality is fit for it; leave one comparable group out for the error.

    A row that names a cluster or stack other than the given one is skipped, as is one that cannot be or is a hundred
    times off the prior; `skipped` says why, and `notes` what is odd about others, or why they are none to fit to.
    `numbers` are those of the rows in their table: 1, 2, 3 and so on where there are none. Raises TrimaranError when no
    row is left, or rows are of several clusters or stacks.
    """
    read: list[tuple[int, Measurement, Observation, tuple[str, ...]]] = []
    skipped: dict[int, str] = {}
    notes: dict[int, tuple[str, ...]] = {}
    numbered = enumerate(measurements, start=1) if numbers is None else zip(numbers, measurements, strict=True)
    for number, row in numbered:
        if unfit := _unfit(row):
            notes[number] = (f"{unfit}, so it is not fitted to",)
            continue
        try:
            read.append((number, row, *observation(row, cluster, stack)))
        except TrimaranError as error:
            skipped[number] = f"row {number}: {error}"
    observations: list[Observation] = []
    groups: list[str] = []
    subjects: set[tuple[str, str]] = set()
    for (number, row, observed, odd), reason in zip(read, _absurd([seen for _, _, seen, _ in read]), strict=True):
        if reason:
            skipped[number] = f"row {number}: {reason}"
            continue
        notes[number] = odd
        subjects.add(subject(row.cluster or cluster or "", row.stack or stack or ""))
        observations.append(observed)
        groups.append(row.comparable_group or f"{row.table}")
    told = [skipped[number] for number in sorted(skipped)]
    if told and not observations:
        raise TrimaranError(f"fit: none of {len(told)} rows that ran can be fitted to; {told[0]}")
    _same_subject(subjects)
    if len(set(groups)) == 1:
        groups = [observed.layout.label() for observed in observations]
    return replace(fit_observations(observations, groups, told), notes=tuple(sorted(notes.items())))


def fit_observations(
    seen: Sequence[Observation],
    groups: Sequence[str],
    skipped: Sequence[str] = (),
    start: Calibration | None = None,
) -> Fitted:
    """Learn from observations of one cluster and stack; leave one of their groups out for the error.

    `start` is what is known before: the first observation's calibration unless it is given.
    """
    calibration, lessons = learn(seen, start, groups)
    several = len(set(groups)) >= LEAST_GROUPS
    left_out = {lesson.quantity.name: np.array(lesson.left_out) for lesson in lessons} if several else {}
    errors = {
        lesson.quantity.error: _error(lesson.error, left_out[lesson.quantity.name]) for lesson in lessons if several
    }
    mapes = {name: float(np.mean(np.abs(np.exp(residuals) - 1.0))) for name, residuals in left_out.items()}
    return Fitted(
        calibration.model_copy(update=errors),
        len(seen),
        len(set(groups)),
        mapes.get("time"),
        mapes.get("memory"),
        tuple(skipped),
        lessons,
    )


def _error(expected: float, left_out: Floats) -> float:
    """Relative error (1 sigma) from the one that a belief expects of itself and from the residuals of rows left out.

    Their standard deviation is taken from the mean absolute one, which strays less with a wild row.
    """
    sigma = float(np.mean(np.abs(left_out))) * MEAN_TO_SIGMA
    return float(np.sqrt((PRIOR_ROWS * expected**2 + len(left_out) * sigma**2) / (PRIOR_ROWS + len(left_out))))


def observation(
    row: Measurement, cluster: str | None = None, stack: str | None = None
) -> tuple[Observation, tuple[str, ...]]:
    """The row as the fit sees it, and what is odd about it. Raises TrimaranError when it cannot be predicted."""
    nouns = nouns_of(row, cluster, stack)
    notes = nouns.oddities()
    observed = Observation(
        Case.of(nouns.workload, nouns.cluster, nouns.stack),
        nouns.layout,
        sec_per_it=seconds_of(row, nouns),
        mem_gib=row.mem_gib,
        day=row.date or "",
    )
    return observed, notes


def _absurd(seen: Sequence[Observation]) -> list[str | None]:
    """Of each row why it cannot be true, if it cannot: its time or memory against the prior's."""
    seconds, gib = np.empty(len(seen)), np.empty(len(seen))
    for batch in batches(seen):
        known = batch.case.calibrated(prior(batch.case.cluster, batch.case.stack))
        seconds[batch.index] = time_many(known, batch.grid)
        gib[batch.index] = memory_many(known, batch.grid)[1]
    return [
        _far("sec_per_it", "s", row.sec_per_it, time) or _far("mem_gib", "GiB", row.mem_gib, memory)
        for row, time, memory in zip(seen, seconds.tolist(), gib.tolist(), strict=True)
    ]


def _far(name: str, unit: str, value: float | None, expected: float) -> str | None:
    if not value or expected / ABSURD < value < expected * ABSURD:
        return None
    return f"{name} {value:g} {unit} where the prior expects {expected:.3g} {unit}: check its unit and its row"


def _same_subject(subjects: set[tuple[str, str]]) -> None:
    """Raises TrimaranError where rows name no cluster and stack, or several: how each of them ran does not count."""
    if not subjects:
        raise TrimaranError(
            "fit: no row that ran has sec_per_it or mem_gib and quality ok or corrected: nothing to fit"
        )
    if len(subjects) > 1:
        names = ", ".join("/".join(subject) for subject in sorted(subjects)[:4])
        raise TrimaranError(f"fit: rows are of {len(subjects)} clusters and stacks ({names}): fit one at a time")
