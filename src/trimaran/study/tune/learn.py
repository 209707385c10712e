"""What trials teach: the cost model fitted to them, and how far a measured time may be off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from trimaran.cost.calibration import Calibration
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.fit.fit_rows import fit_observations
from trimaran.cost.fit.solve import Observation
from trimaran.nouns.measurement import Measurement
from trimaran.store.compare import timed_steps
from trimaran.study.tune.choose import Candidate
from trimaran.study.tune.surrogate import NOISE_STD

# No fit is trusted below the run-to-run noise of a trial, however well it meets a few rows.
LEAST_ERROR = 0.03


def fitted(case: Case, tried: Sequence[Candidate]) -> Calibration | None:
    """What the candidates that ran teach beyond the case's own calibration; None where none ran."""
    seen = [
        Observation(
            case.given_to(candidate.layout),
            candidate.layout,
            candidate.seconds,
            candidate.row.mem_gib,
            candidate.row.date or "",
        )
        for candidate in tried
        if candidate.row is not None and candidate.row.status == "ok"
    ]
    if not any(observed.sec_per_it or observed.mem_gib for observed in seen):
        return None
    return fit_observations(seen, [observed.layout.label() for observed in seen]).calibration


def predict_anew(case: Case, candidates: Sequence[Candidate], tried: Sequence[Candidate]) -> float:
    """Predict all candidates by what was measured of those tried; the relative error (1 sigma) of the predictions."""
    calibration = fitted(case, tried)
    if calibration is None:
        return case.calibration.time_error
    learned = case.calibrated(calibration)
    for candidate in candidates:
        on = learned.given_to(candidate.layout)
        candidate.predicted_sec_per_it = estimate(on, candidate.layout).sec_per_it
    return max(calibration.time_error, LEAST_ERROR)


def step_noise(row: Measurement) -> float:
    """Relative standard error of a row's median step, from the quartiles of its timed steps.

    A normal distribution has an interquartile range of 1.349 sigma, and the median of n values errs by
    1.253 sigma / sqrt(n).
    """
    if not row.sec_per_it or row.sec_per_it_spread is None:
        return 0.0
    steps = max(1, len(timed_steps(row)))
    return 1.253 * row.sec_per_it_spread / 1.349 / math.sqrt(steps) / row.sec_per_it


def trial_noise(rows: Sequence[Measurement]) -> float:
    """Relative standard deviation of a trial that is run again, pooled over the trials that were."""
    by_trial: dict[str, list[float]] = {}
    for row in rows:
        if row.status == "ok" and row.sec_per_it and row.trial_key:
            by_trial.setdefault(row.trial_key, []).append(math.log(row.sec_per_it))
    repeated = [logs for logs in by_trial.values() if len(logs) > 1]
    freedom = sum(len(logs) - 1 for logs in repeated)
    if not freedom:
        return NOISE_STD
    squares = sum((value - statistics.mean(logs)) ** 2 for logs in repeated for value in logs)
    return max(NOISE_STD, math.sqrt(squares / freedom))
