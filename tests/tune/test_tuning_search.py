"""The search measures what it was told first, honours its limits, and survives failures."""

from __future__ import annotations

from pathlib import Path

from trimaran.bench.workspace import stated_layouts
from trimaran.cost.calibration import prior
from trimaran.cost.estimate import estimate
from trimaran.files import load_cluster, load_recipe
from trimaran.layout import Layout
from trimaran.measurement import Measurement
from trimaran.rows import workload_cells
from trimaran.tune.choose import Candidate
from trimaran.tune.search import search
from trimaran.tune.study import LEAST_ERROR, learned

CANDIDATES = [Candidate(Layout(dp=dp, mbs=mbs), 1.0 + 0.1 * i, 1.0) for i, (dp, mbs) in enumerate(
    (dp, mbs) for dp in (1, 2, 4) for mbs in (1, 2, 4)
)]  # fmt: skip


def test_stated_layouts_come_first_and_min_trials_are_made() -> None:
    found = search(CANDIDATES, lambda i: 1.0 + 0.1 * i, first=[8, 7], min_trials=5, prior_error=0.01)
    assert found.order[:2] == (8, 7) and len(found.order) >= 5
    assert found.best == 0


def test_max_trials_bound_the_search() -> None:
    found = search(CANDIDATES, lambda i: 1.0, max_trials=3, prior_error=0.5)
    assert len(found.order) == 3


def test_failures_are_kept_and_the_best_of_the_rest_wins() -> None:
    found = search(CANDIDATES, lambda i: None if i < 3 else float(i), prior_error=0.1)
    assert found.best == 3 and found.failed <= {0, 1, 2}


def test_when_everything_fails_there_is_no_winner() -> None:
    found = search(CANDIDATES, lambda i: None)
    assert found.best is None and len(found.order) == len(CANDIDATES) and not found.verdict.certain


def test_a_fit_that_meets_every_row_is_trusted_no_further_than_the_noise_of_a_trial() -> None:
    recipe = load_recipe(str(Path(__file__).parents[2] / "recipes" / "laptop.toml"))
    cluster = load_cluster("dgx-h100")
    candidates = [Candidate(layout, 1.0, 1.0) for layout in stated_layouts(recipe)[:6]]
    known = prior(cluster, recipe.stack)
    rows = {}
    for index, one in enumerate(candidates):
        seconds = estimate(recipe.workload, cluster, recipe.stack, one.layout, known).sec_per_it
        shape = dict(workload_cells(recipe.workload))
        rows[index] = Measurement.model_validate({**shape, "mbs": one.layout.mbs, "sec_per_it": seconds})
    seconds_of = {index: row.sec_per_it or 0.0 for index, row in rows.items()}
    outlook = learned(recipe, cluster, known, candidates, rows, seconds_of)
    assert outlook.error >= LEAST_ERROR
