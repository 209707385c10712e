"""How many trials a tuning needs: published BLOOM tables replayed as an oracle, against other searches.

    python benchmarks/tune.py

Each search picks rows of the 02-25 group of the BLOOM prequel one by one and is told the seconds per
iteration of that row (or that it ran out of memory), until it has one within 1.2% of the best. Trimaran's
cost model stands on its prior and on what the search has measured, nothing else of that document.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.cost.calibration import Calibration, prior
from trimaran.cost.estimate import estimate
from trimaran.report.tables import Field, render
from trimaran.rows import Nouns, nouns_of, packaged_table
from trimaran.tune.choose import Candidate
from trimaran.tune.search import search

GROUP = "prequel-0225-L72-H14336"
SEEDS = 50
GOOD_ENOUGH = 1.012


@dataclass(frozen=True)
class Oracle:
    """Distinct layouts of the group, and what each was measured at (None: it ran out of memory)."""

    nouns: Sequence[Nouns]
    seconds_per_sequence: Sequence[float | None]

    @property
    def good(self) -> set[int]:
        """Layouts within 1.2% of the best."""
        best = min(s for s in self.seconds_per_sequence if s is not None)
        return {i for i, s in enumerate(self.seconds_per_sequence) if s is not None and s <= best * GOOD_ENOUGH}


def oracle() -> Oracle:
    """The group's rows fit for ranking; repeats averaged."""
    rows = [
        m
        for m in packaged_table().measurements
        if m.comparable_group == GROUP and m.quality in ("ok", "corrected") and m.status in ("ok", "oom")
    ]
    by_layout: dict[tuple[str, int], list[float | None]] = {}
    nouns: dict[tuple[str, int], Nouns] = {}
    for row in rows:
        found = nouns_of(row)
        key = (found.layout.label(), row.gbs)
        nouns[key] = found
        by_layout.setdefault(key, []).append(row.sec_per_it / row.gbs if row.sec_per_it else None)
    seconds = []
    for times in by_layout.values():
        ran = [t for t in times if t is not None]
        seconds.append(statistics.mean(ran) if ran else None)
    return Oracle(list(nouns.values()), seconds)


def trials_until_good(order: Sequence[int], known: Oracle) -> int:
    """Place of the first good layout in the order tried, counted from 1."""
    return next(place for place, index in enumerate(order, start=1) if index in known.good)


def trimaran(known: Oracle, seed: int) -> int:
    """Trimaran's own search, on the cost model's prior. The seed shuffles the rows, which breaks ties."""
    shuffled = np.random.default_rng(seed).permutation(len(known.nouns)).tolist()
    calibration = prior(known.nouns[0].cluster, known.nouns[0].stack)
    found = search(
        [_candidate(known.nouns[index], calibration) for index in shuffled],
        lambda place: known.seconds_per_sequence[shuffled[place]],
        prior_error=calibration.time_error,
        min_trials=len(shuffled),
        max_trials=len(shuffled),
    )
    return trials_until_good([shuffled[place] for place in found.order], known)


def _candidate(nouns: Nouns, calibration: Calibration) -> Candidate:
    """A row as the search sees it: seconds per sequence, since global batches differ; what does not fit comes last."""
    predicted = estimate(nouns.workload, nouns.cluster, nouns.stack, nouns.layout, calibration)
    per_sequence = predicted.sec_per_it / nouns.workload.global_batch
    return Candidate(nouns.layout, per_sequence if predicted.fits else 10 * per_sequence, predicted.mem_gib)


def grid(known: Oracle, seed: int) -> int:
    """The rows as a nested loop over TP, PP, DP, MBS would visit them."""
    order = sorted(
        range(len(known.nouns)),
        key=lambda i: (
            known.nouns[i].layout.tp,
            known.nouns[i].layout.pp,
            known.nouns[i].layout.dp,
            known.nouns[i].layout.mbs,
        ),
    )
    return trials_until_good(order, known)


def random(known: Oracle, seed: int) -> int:
    """Rows in random order."""
    return trials_until_good(np.random.default_rng(seed).permutation(len(known.nouns)).tolist(), known)


def main() -> None:
    """Print the table."""
    known = oracle()
    records = []
    for name, run in (("Trimaran", trimaran), ("random", random), ("grid order", grid)):
        trials = [run(known, seed) for seed in range(SEEDS)]
        records.append({"search": name, "mean": statistics.mean(trials), "worst": max(trials)})
    fields = [
        Field("search", "Search", left=True),
        Field("mean", "Trials, mean", ".1f"),
        Field("worst", "Trials, worst"),
    ]
    print(f"{GROUP}: {len(known.nouns)} layouts, {len(known.good)} within 1.2% of the best; {SEEDS} seeds")
    print(render(records, fields, "markdown"))


if __name__ == "__main__":
    main()
