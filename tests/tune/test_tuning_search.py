"""The search measures what it was told first, honours its limits, and survives failures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import pytest

from trimaran.bench.trial.trial_figures import median_and_spread
from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import load_cluster
from trimaran.files.recipe_file import load_recipe
from trimaran.files.row_nouns import workload_cells
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.measurement import Measurement
from trimaran.study.stated import stated_layouts
from trimaran.study.tune.choose import Candidate
from trimaran.study.tune.learn import LEAST_ERROR, predict_anew, step_noise, trial_noise
from trimaran.study.tune.prepare import candidates_of
from trimaran.study.tune.surrogate import NOISE_STD, believe, features
from trimaran.study.tune.tuning_search import SearchResult, search

SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 256, "mbs": 1, "gbs": 8}
LAYOUTS = [Layout(dp=dp, mbs=mbs) for dp in (1, 2, 4) for mbs in (1, 2, 4)]
PREDICTED = [1.0 + 0.1 * index for index in range(len(LAYOUTS))]


def candidates(stated: Collection[int] = ()) -> list[Candidate]:
    return [
        Candidate(layout, predicted, 1.0, stated=index in stated)
        for index, (layout, predicted) in enumerate(zip(LAYOUTS, PREDICTED, strict=True))
    ]


def row(seconds: float | None) -> Measurement:
    """A row of these seconds, or of a layout that did not run."""
    return Measurement.model_validate(SHAPE | {"sec_per_it": seconds, "status": "ok" if seconds else "oom"})


def measuring(seconds: Callable[[int], float | None]) -> Callable[[Candidate], None]:
    """A machine on which the layout of that index takes so long."""

    def measure(candidate: Candidate) -> None:
        candidate.row = row(seconds(LAYOUTS.index(candidate.layout)))

    return measure


def indexes(tried: Sequence[Candidate]) -> list[int]:
    return [LAYOUTS.index(candidate.layout) for candidate in tried]


def winner(result: SearchResult) -> int:
    assert result.verdict.best is not None
    return LAYOUTS.index(result.verdict.best.layout)


def test_stated_layouts_come_first_and_min_trials_are_made() -> None:
    machine = measuring(lambda index: 1.0 + 0.1 * index)
    result = search(candidates(stated=[8, 7]), machine, min_trials=5, prior_error=0.01)
    assert indexes(result.tried)[:2] == [7, 8] and len(result.tried) >= 5
    assert winner(result) == 0


def test_max_trials_bound_the_search() -> None:
    assert len(search(candidates(), measuring(lambda index: 1.0), max_trials=3, prior_error=0.5).tried) == 3
    assert len(search(candidates(stated=range(9)), measuring(lambda index: 1.0), max_trials=3).tried) == 3


def test_failures_are_kept_and_the_best_of_the_rest_wins() -> None:
    machine = measuring(lambda index: None if index < 3 else float(index))
    result = search(candidates(), machine, prior_error=0.1)
    assert winner(result) == 3
    assert {index for index in indexes(result.tried) if index < 3} == set(
        indexes([candidate for candidate in result.tried if candidate.failed])
    )


def test_what_was_measured_before_is_known_and_counts_in_no_limit() -> None:
    known = candidates()
    for index, seconds in ((0, None), (1, 1.1), (5, 1.5)):
        known[index].row = row(seconds)
    machine = measuring(lambda index: 1.0 + 0.1 * index)
    result = search(known, machine, max_trials=2, min_trials=2, prior_error=0.5)
    assert indexes(result.tried)[:3] == [0, 1, 5]
    assert len(result.tried) == 5 == len(set(indexes(result.tried)))
    assert winner(result) == 1


def test_a_noisy_row_is_believed_less_and_so_is_what_it_says_of_others() -> None:
    layouts, predicted = LAYOUTS, PREDICTED
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
    def timed(key: str, times: tuple[float, ...]) -> Measurement:
        median, spread = median_and_spread(times, 1)
        fields = {"trial_key": key, "sec_per_it": median, "sec_per_it_spread": spread, "step_times_s": times}
        return Measurement.model_validate({**SHAPE, **fields})

    random = np.random.default_rng(1)
    for sigma in (0.02, 0.1):
        medians, noises = [], []
        for _ in range(300):
            trial = timed("k", (9.0, *(np.exp(sigma * random.standard_normal(25))).tolist()))
            medians.append(trial.sec_per_it)
            noises.append(step_noise(trial))
        assert float(np.mean(noises)) == pytest.approx(float(np.std(medians)), rel=0.15)
    assert trial_noise([timed("a", (2.0, 1.0)), timed("b", (2.0, 3.0))]) == NOISE_STD
    assert trial_noise([timed("a", (2.0, 1.0)), timed("a", (2.0, 1.2))]) == pytest.approx(
        np.std([0, np.log(1.2)], ddof=1)
    )


def test_a_layout_that_the_recipe_states_twice_is_one_candidate() -> None:
    recipe = load_recipe(str(Path(__file__).parents[2] / "recipes" / "laptop.toml"))
    twice = recipe.sweep.model_copy(update={"layouts": ("dp2,mbs4", "dp2,mbs4", "pp2,mbs1", "pp2,mbs1,split4-2")})
    cluster = load_cluster("dgx-h100")
    known = candidates_of(
        recipe.model_copy(update={"sweep": twice}),
        Case.of(recipe.workload, cluster, recipe.stack, prior(cluster, recipe.stack)),
    )
    stated = [candidate.layout for candidate in known if candidate.stated]
    assert {(layout.dp, layout.pp, layout.mbs) for layout in stated} == {(2, 1, 4), (1, 2, 1)} and len(stated) <= 3
    assert len(known) > len(stated) and len({candidate.layout for candidate in known}) == len(known)


def test_layouts_that_differ_in_anything_are_apart_to_the_surrogate() -> None:
    texts = ("pp2", "pp2,gpipe", "pp2,zero_bubble", "pp2,vpp2", "pp2,split5-3", "pp2,sp", "pp2,ps", "pp2,zero1",
             "pp2,fp16", "pp2,recompute-full", "pp2,recompute-full2", "pp2,place-dp-tp-pp", "pp4", "tp2", "dp2",
             "mbs2")  # fmt: skip
    points = features([parse_layout(text) for text in texts])
    assert len({tuple(point) for point in points}) == len(texts)


def test_when_everything_fails_there_is_no_winner() -> None:
    result = search(candidates(), measuring(lambda index: None))
    assert result.verdict.best is None and len(result.tried) == len(LAYOUTS) and not result.verdict.certain


def test_a_fit_that_meets_every_row_is_trusted_no_further_than_the_noise_of_a_trial() -> None:
    recipe = load_recipe(str(Path(__file__).parents[2] / "recipes" / "laptop.toml"))
    cluster = load_cluster("dgx-h100")
    tried = [Candidate(layout, 1.0, 1.0) for layout in stated_layouts(recipe)[:6]]
    case = Case.of(recipe.workload, cluster, recipe.stack, prior(cluster, recipe.stack))
    for candidate in tried:
        seconds = estimate(case, candidate.layout).sec_per_it
        shape = dict(workload_cells(recipe.workload))
        candidate.row = Measurement.model_validate({**shape, "mbs": candidate.layout.mbs, "sec_per_it": seconds})
    assert predict_anew(case, tried, []) == case.calibration.time_error
    assert {candidate.predicted_sec_per_it for candidate in tried} == {1.0}, "no row teaches nothing"
    assert LEAST_ERROR <= predict_anew(case, tried, tried[:1]) <= case.calibration.time_error
    assert predict_anew(case, tried, tried) >= LEAST_ERROR
    for candidate in tried:
        assert candidate.predicted_sec_per_it == pytest.approx(candidate.seconds, rel=0.05)
