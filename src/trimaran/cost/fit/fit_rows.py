"""Fitting to rows of a table: which of them count, and how well the fit holds on rows it has not seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.cost.calibration import Calibration, prior
from trimaran.cost.case import Case
from trimaran.cost.fit.solve import Observation, batches, fit, leave_out, predict_memory, predict_times
from trimaran.files.row_nouns import nouns_of
from trimaran.layout.rules import check_layout
from trimaran.nouns.columns import FIT_QUALITIES
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError

# A time or memory so many times off the prior is another unit or another row's, not news of the machine.
ABSURD = 100.0
# Fewer groups than this say nothing of rows not seen: the prior's own error then stands.
LEAST_GROUPS = 3


@dataclass(frozen=True)
class Fitted:
    """A calibration and what it rests on.

    Errors are mean relative ones on groups left out of the fit, or None where there are too few.
    A group is a comparable group or, where all rows are of one, a layout.
    """

    calibration: Calibration
    rows: int
    groups: int
    time_mape: float | None
    mem_mape: float | None
    skipped: tuple[str, ...]


def fit_rows(measurements: Iterable[Measurement], *, cluster: str | None = None, stack: str | None = None) -> Fitted:
    """Fit to the rows that ran and whose quality is fit for it; leave one comparable group out for the error.

    A row that names a cluster or stack other than the given one is skipped, as is one that breaks
    a rule or is a hundred times off the prior; `skipped` says why. Raises TrimaranError when no row is
    left, or rows are of several clusters or stacks.
    """
    observations: list[Observation] = []
    groups: list[str] = []
    skipped: list[str] = []
    for number, row in enumerate(measurements, start=1):
        if row.status != "ok" or row.quality not in FIT_QUALITIES or not (row.sec_per_it or row.mem_gib):
            continue
        try:
            observed = observation(row, cluster, stack)
        except TrimaranError as error:
            skipped.append(f"row {number}: {error}")
            continue
        if reason := _absurd(observed):
            skipped.append(f"row {number}: {reason}")
            continue
        observations.append(observed)
        groups.append(row.comparable_group or f"{row.table}")
    if skipped and not observations:
        raise TrimaranError(f"fit: none of {len(skipped)} rows that ran can be fitted to; {skipped[0]}")
    _same_subject(observations)
    if len(set(groups)) == 1:
        groups = [observed.layout.label() for observed in observations]
    return fit_observations(observations, groups, skipped)


def fit_observations(observations: Sequence[Observation], groups: Sequence[str], skipped: Sequence[str] = ()) -> Fitted:
    """Fit to observations of one cluster and stack; leave one of their groups out for the error."""
    calibration = fit(observations)
    time_mape, mem_mape = _held_out_errors(observations, groups)
    errors = {"time_error": time_mape, "mem_error": mem_mape}
    # a mean absolute error of a normal distribution is sqrt(2 / pi) of its standard deviation
    update = {name: value * float(np.sqrt(np.pi / 2)) for name, value in errors.items() if value is not None}
    calibration = calibration.model_copy(update=update)
    return Fitted(calibration, len(observations), len(set(groups)), time_mape, mem_mape, tuple(skipped))


def observation(row: Measurement, cluster: str | None = None, stack: str | None = None) -> Observation:
    """The row as the fit sees it. Raises TrimaranError when it cannot be predicted."""
    nouns = nouns_of(row, cluster, stack)
    check_layout(nouns.layout, nouns.workload, nouns.cluster, nouns.stack)
    return Observation(
        Case.of(nouns.workload, nouns.cluster, nouns.stack),
        nouns.layout,
        sec_per_it=row.sec_per_it,
        mem_gib=row.mem_gib,
        day=row.date or "",
    )


def _absurd(observed: Observation) -> str | None:
    """Why a row cannot be true, if it cannot: its time or memory against the prior's."""
    known = prior(observed.case.cluster, observed.case.stack)
    prepared = batches([observed])
    for name, unit, value, predict in (
        ("sec_per_it", "s", observed.sec_per_it, predict_times),
        ("mem_gib", "GiB", observed.mem_gib, predict_memory),
    ):
        expected = float(predict(prepared, 1, known)[0])
        if value and not expected / ABSURD < value < expected * ABSURD:
            return f"{name} {value:g} {unit} where the prior expects {expected:.3g} {unit}: check its unit and its row"
    return None


def _same_subject(observations: Sequence[Observation]) -> None:
    if not observations:
        raise TrimaranError(
            "fit: no row that ran has sec_per_it or mem_gib and quality ok or corrected: nothing to fit"
        )
    subjects = sorted({(observed.case.cluster.name, observed.case.stack.name) for observed in observations})
    if len(subjects) > 1:
        names = ", ".join("/".join(subject) for subject in subjects[:4])
        raise TrimaranError(f"fit: rows are of {len(subjects)} clusters and stacks ({names}): fit one at a time")


def _held_out_errors(observations: Sequence[Observation], groups: Sequence[str]) -> tuple[float | None, float | None]:
    names = list(dict.fromkeys(groups))
    if len(names) < LEAST_GROUPS:
        return None, None
    without = leave_out(observations, groups)
    time_errors: list[float] = []
    mem_errors: list[float] = []
    for name in names:
        members = [observed for observed, group in zip(observations, groups, strict=True) if group == name]
        prepared = batches(members)
        times = predict_times(prepared, len(members), without[name])
        memory = predict_memory(prepared, len(members), without[name])
        for index, observed in enumerate(members):
            if observed.sec_per_it:
                time_errors.append(abs(float(times[index]) / observed.sec_per_it - 1))
            if observed.mem_gib:
                mem_errors.append(abs(float(memory[index]) / observed.mem_gib - 1))
    return _mean(time_errors), _mean(mem_errors)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
