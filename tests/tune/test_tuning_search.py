"""The search measures what it was told first, honours its limits, and survives failures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trimaran.bench.trial.result import median_and_spread
from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import load_cluster
from trimaran.files.recipe_file import load_recipe
from trimaran.files.row_nouns import workload_cells
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.measurement import Measurement
from trimaran.study.tune.choose import Candidate
from trimaran.study.tune.search import search
from trimaran.study.tune.surrogate import NOISE_STD, believe, features
from trimaran.study.tune.tune import LEAST_ERROR, candidates_of, learned, step_noise, trial_noise
from trimaran.study.workspace import stated_layouts

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


def test_what_was_measured_before_is_known_and_counts_in_no_limit() -> None:
    tried: list[int] = []

    def measure(index: int) -> float:
        tried.append(index)
        return 1.0 + 0.1 * index

    before = {0: None, 1: 1.1, 5: 1.5}
    found = search(CANDIDATES, measure, evidence=before, max_trials=2, min_trials=2, prior_error=0.5)
    assert len(tried) == 2 and not {0, 1, 5} & set(tried)
    assert found.best == 1 and found.failed == {0} and found.order == tuple(tried)


def test_a_noisy_row_is_believed_less_and_so_is_what_it_says_of_others() -> None:
    layouts, predicted = [one.layout for one in CANDIDATES], [one.predicted_sec_per_it for one in CANDIDATES]
    sure, unsure = (believe(layouts, predicted, {0: 1.5}, 0.3, {0: noise}) for noise in (0.01, 0.2))
    assert sure.std[0] == pytest.approx(0.01, rel=0.1) and unsure.std[0] > 0.1
    assert np.all(sure.mean > unsure.mean) and np.all(sure.std < unsure.std)


def test_what_all_candidates_share_makes_no_rival() -> None:
    layouts = [Layout(dp=1), Layout(dp=1, mbs=2)]
    belief = believe(layouts, [1.0, 1.0], {0: 1.5}, 0.3)
    # the second one errs by 0.2 or so, and mostly with the first
    assert belief.chance_faster(0, 0.02)[1] < 0.5
    assert belief.chance_faster(0, 0.5)[1] < 0.01


def test_the_noise_of_a_trial_comes_from_its_steps_and_its_repeats() -> None:
    stated = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 256, "mbs": 1, "gbs": 8}

    def row(key: str, times: tuple[float, ...]) -> Measurement:
        median, spread = median_and_spread(times, 1)
        fields = {"trial_key": key, "sec_per_it": median, "sec_per_it_spread": spread, "step_times_s": times}
        return Measurement.model_validate({**stated, **fields})

    random = np.random.default_rng(1)
    for sigma in (0.02, 0.1):
        medians, noises = [], []
        for _ in range(300):
            one = row("k", (9.0, *(np.exp(sigma * random.standard_normal(25))).tolist()))
            medians.append(one.sec_per_it)
            noises.append(step_noise(one))
        assert float(np.mean(noises)) == pytest.approx(float(np.std(medians)), rel=0.15)
    assert trial_noise([row("a", (2.0, 1.0)), row("b", (2.0, 3.0))]) == NOISE_STD
    assert trial_noise([row("a", (2.0, 1.0)), row("a", (2.0, 1.2))]) == pytest.approx(np.std([0, np.log(1.2)], ddof=1))


def test_a_layout_that_the_recipe_states_twice_is_one_candidate() -> None:
    recipe = load_recipe(str(Path(__file__).parents[2] / "recipes" / "laptop.toml"))
    twice = recipe.sweep.model_copy(update={"layouts": ("dp2,mbs4", "dp2,mbs4", "pp2,mbs1", "pp2,mbs1,split4-2")})
    cluster = load_cluster("dgx-h100")
    candidates, stated = candidates_of(
        recipe.model_copy(update={"sweep": twice}), cluster, prior(cluster, recipe.stack)
    )  # fmt: skip
    own = {(one.layout.dp, one.layout.pp, one.layout.mbs) for one in candidates[:stated]}
    assert own == {(2, 1, 4), (1, 2, 1)} and stated <= 3


def test_layouts_that_differ_in_anything_are_apart_to_the_surrogate() -> None:
    texts = ("pp2", "pp2,gpipe", "pp2,zero_bubble", "pp2,vpp2", "pp2,split5-3", "pp2,sp", "pp2,ps", "pp2,zero1",
             "pp2,fp16", "pp2,recompute-full", "pp2,recompute-full2", "pp2,place-dp-tp-pp", "pp4", "tp2", "dp2",
             "mbs2")  # fmt: skip
    points = features([parse_layout(text) for text in texts])
    assert len({tuple(point) for point in points}) == len(texts)


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
        seconds = estimate(Case.of(recipe.workload, cluster, recipe.stack, known), one.layout).sec_per_it
        shape = dict(workload_cells(recipe.workload))
        rows[index] = Measurement.model_validate({**shape, "mbs": one.layout.mbs, "sec_per_it": seconds})
    seconds_of = {index: row.sec_per_it or 0.0 for index, row in rows.items()}
    outlook = learned(recipe, cluster, known, candidates, rows, seconds_of)
    assert outlook.error >= LEAST_ERROR
