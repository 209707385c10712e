"""How many trials a tuning needs: published tables replayed as oracles, beside other searches.

    python benchmarks/tune.py

Each search picks rows of a table one by one and is told the seconds per iteration of that row, off by 1% (1 sigma)
anew with every seed, or that it ran out of memory, until it has picked one within 1.2% of the best. Trimaran's cost
model stands on its prior and on what the search has measured, nothing else of that table; it learns after every trial.
Optuna's TPE chooses tp, then pp, mbs, global batch and recompute among what the table holds. Writes
benchmarks/results/tune.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna

from trimaran.cost.calibration import Calibration, prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.fit.fit_rows import fit_observations
from trimaran.cost.fit.solve import Observation
from trimaran.files.catalogue import write_atomically
from trimaran.files.row_nouns import Nouns, nouns_of
from trimaran.files.row_table import packaged_table, packaged_tables
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.study.tune.choose import Candidate, decide
from trimaran.study.tune.learn import LEAST_ERROR
from trimaran.study.tune.surrogate import NOISE_STD

RESULTS = Path(__file__).parent / "results" / "tune.md"
# Fewer layouts are no sweep.
LEAST_LAYOUTS = 6
SEEDS = 10
GOOD_ENOUGH = 1.012
AXES = ("tp", "pp", "mbs", "gbs", "recompute")
ASKED_AT_MOST = 100
# What `trimaran tune` minds unless it is told otherwise.
MARGIN = 0.02


@dataclass(frozen=True)
class Oracle:
    """Distinct layouts of a table, and what each was measured at (None: it ran out of memory)."""

    rows: Sequence[Measurement]
    nouns: Sequence[Nouns]
    seconds_per_sequence: Sequence[float | None]

    @property
    def good(self) -> set[int]:
        """Layouts within 1.2% of the best."""
        best = min(s for s in self.seconds_per_sequence if s is not None)
        return {i for i, s in enumerate(self.seconds_per_sequence) if s is not None and s <= best * GOOD_ENOUGH}

    def measured(self, seed: int) -> list[float | None]:
        """The table as a run of that seed would have measured it."""
        off = np.exp(NOISE_STD * np.random.default_rng(seed).standard_normal(len(self.nouns)))
        return [None if s is None else s * float(by) for s, by in zip(self.seconds_per_sequence, off, strict=True)]


def sweeps() -> dict[str, Oracle]:
    """Every comparable group, of one stack, of the packaged tables that has enough layouts, by its name."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for table in packaged_tables():
        for row in packaged_table(table).measurements:
            if row.comparable_group and row.quality in ("ok", "corrected") and row.status in ("ok", "oom"):
                groups.setdefault((row.comparable_group, row.stack or ""), []).append(row)
    found = {group: oracle(rows) for (group, _), rows in groups.items() if len(rows) >= LEAST_LAYOUTS}
    return {group: known for group, known in found.items() if len(known.nouns) >= LEAST_LAYOUTS}


def oracle(rows: Sequence[Measurement]) -> Oracle:
    """Rows fit for ranking; repeats averaged."""
    by_layout: dict[tuple[str, int], list[float | None]] = {}
    by_key: dict[tuple[str, int], tuple[Measurement, Nouns]] = {}
    for row in rows:
        try:
            nouns = nouns_of(row)
        except TrimaranError:
            continue
        key = (nouns.layout.label(), row.gbs)
        by_key[key] = row, nouns
        by_layout.setdefault(key, []).append(row.sec_per_it / row.gbs if row.sec_per_it else None)
    seconds = []
    for times in by_layout.values():
        ran = [t for t in times if t is not None]
        seconds.append(statistics.mean(ran) if ran else None)
    return Oracle([row for row, _ in by_key.values()], [nouns for _, nouns in by_key.values()], seconds)


def trials_until_good(order: Sequence[int], known: Oracle) -> int:
    """Place of the first good layout in the order tried, counted from 1."""
    return next(place for place, index in enumerate(order, start=1) if index in known.good)


def trimaran(known: Oracle, seed: int) -> int:
    """Trimaran's own search, from the cost model's prior; the seed shuffles the rows, which breaks ties."""
    shuffled = np.random.default_rng(seed).permutation(len(known.nouns)).tolist()
    seconds = known.measured(seed)
    start = prior(known.nouns[0].cluster, known.nouns[0].stack)
    indexes = {_candidate(known.nouns[index], start): index for index in shuffled}
    tried: list[Candidate] = []
    error = start.time_error
    while True:
        candidate = decide(list(indexes), error, MARGIN).next
        assert candidate is not None, "a good layout is among those not tried"
        index = indexes[candidate]
        measured = seconds[index]
        status = "oom" if measured is None else "ok"
        candidate.row = known.rows[index].model_copy(update={"sec_per_it": measured, "status": status})
        tried.append(candidate)
        if index in known.good:
            return len(tried)
        error = _learn(known, indexes, tried, start)


def _candidate(nouns: Nouns, calibration: Calibration) -> Candidate:
    """A row as the search sees it: seconds per sequence, since global batches differ; what does not fit comes last."""
    predicted = estimate(Case.of(nouns.workload, nouns.cluster, nouns.stack, calibration), nouns.layout)
    per_sequence = predicted.sec_per_it / nouns.workload.global_batch
    return Candidate(nouns.layout, per_sequence if predicted.fits else 10 * per_sequence, predicted.mem_gib)


def _learn(known: Oracle, indexes: Mapping[Candidate, int], tried: Sequence[Candidate], start: Calibration) -> float:
    """Predict all candidates anew by what was measured, as `trimaran tune` does; the error of the predictions."""
    seen = [
        Observation(Case.of(nouns.workload, nouns.cluster, nouns.stack, start), nouns.layout,
                    candidate.seconds * nouns.workload.global_batch)
        for candidate in tried
        if candidate.seconds is not None and (nouns := known.nouns[indexes[candidate]])
    ]  # fmt: skip
    if not seen:
        return start.time_error
    learnt = fit_observations(seen, [observed.layout.label() for observed in seen], start=start).calibration
    for candidate, index in indexes.items():
        candidate.predicted_sec_per_it = _candidate(known.nouns[index], learnt).predicted_sec_per_it
    return max(learnt.time_error, LEAST_ERROR)


def tpe(known: Oracle, seed: int, start_up: int) -> int:
    """Optuna's TPE over the table's axes after `start_up` random trials; out of memory is told as twice the slowest.

    Asking for what was measured before counts as no trial. Where TPE asks for nothing else for long, it stands
    still, and the rest is tried in random order.
    """
    seconds = known.measured(seed)
    slowest = max(s for s in seconds if s is not None)
    places = {_axes(nouns): index for index, nouns in enumerate(known.nouns)}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=start_up))
    order: list[int] = []
    for _ in range(ASKED_AT_MOST):
        trial = study.ask()
        index = places[_suggested(trial, list(places))]
        time = seconds[index]
        study.tell(trial, 2 * slowest if time is None else time)
        if index not in order:
            order.append(index)
        if index in known.good:
            break
    rest = np.random.default_rng(seed).permutation(len(known.nouns)).tolist()
    return trials_until_good([*order, *(index for index in rest if index not in order)], known)


def _suggested(trial: optuna.Trial, left: list[tuple[int | str, ...]]) -> tuple[int | str, ...]:
    """One row of the table, axis by axis; the choices of an axis are those that the axes before it leave."""
    for axis, name in enumerate(AXES):
        choices = sorted({row[axis] for row in left}, key=str)
        before = ", ".join(map(str, left[0][:axis])) if axis else ""
        chosen = trial.suggest_categorical(f"{name} ({before})", choices)
        left = [row for row in left if row[axis] == chosen]
    return left[0]


def _axes(nouns: Nouns) -> tuple[int | str, ...]:
    layout = nouns.layout
    return layout.tp, layout.pp, layout.mbs, nouns.workload.global_batch, layout.recompute  # dp follows from these


def grid(known: Oracle, seed: int) -> int:
    """The rows as a nested loop over TP, PP, MBS would visit them."""
    return trials_until_good(sorted(range(len(known.nouns)), key=lambda i: _axes(known.nouns[i])), known)


def random(known: Oracle, seed: int) -> int:
    """Rows in random order."""
    return trials_until_good(np.random.default_rng(seed).permutation(len(known.nouns)).tolist(), known)


SEARCHES: dict[str, Callable[[Oracle, int], int]] = {
    "Trimaran": trimaran,
    "Optuna TPE, 10 random first (its default)": lambda known, seed: tpe(known, seed, 10),
    "Optuna TPE, 2 random first": lambda known, seed: tpe(known, seed, 2),
    "random": random,
    "grid order": grid,
}
SHOWN = tuple(SEARCHES)


def replayed() -> Iterator[str]:
    """The report's table, line by line: mean trials of every search on every sweep, and over all sweeps."""
    yield f"| sweep | layouts | good | {' | '.join(SHOWN)} |"
    yield f"| --- | --: | --: | {' | '.join('--:' for _ in SHOWN)} |"
    found: list[list[float]] = []
    for group, known in sweeps().items():
        means = [statistics.mean(SEARCHES[name](known, seed) for seed in range(SEEDS)) for name in SHOWN]
        found.append(means)
        yield f"| {group} | {len(known.nouns)} | {len(known.good)} | {' | '.join(f'{mean:.1f}' for mean in means)} |"
    every = " | ".join(f"**{statistics.mean(column):.1f}**" for column in zip(*found, strict=True))
    yield f"| mean of {len(found)} sweeps | | | {every} |"
    every = " | ".join(f"{statistics.median(column):.1f}" for column in zip(*found, strict=True))
    yield f"| median | | | {every} |"


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    lines = [
        "# Trials until a layout within 1.2% of the best was measured\n",
        f"`python benchmarks/tune.py`: sweeps of {LEAST_LAYOUTS} layouts or more of the published tables replayed, "
        f"means of {SEEDS} seeds, each measurement off by {NOISE_STD:.0%} (1 sigma). Optuna {optuna.__version__}.\n",
    ]
    for line in replayed():
        print(line, flush=True)
        lines.append(line)
    write_atomically(RESULTS, "\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
