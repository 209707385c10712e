"""Tune: a recipe's layouts planned, measured and learned from, until the fastest is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimaran.bench.launchers import launcher_of
from trimaran.bench.sweep import Prediction, Progress, kept_row, overlong, run_sweep
from trimaran.cost.calibration import save_calibration
from trimaran.layout.layout import Layout
from trimaran.layout.places import nodes_of
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.columns import Status
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store
from trimaran.study.tune.choose import Candidate, Verdict
from trimaran.study.tune.learn import fitted, predict_anew, step_noise, trial_noise
from trimaran.study.tune.prepare import prepare
from trimaran.study.tune.tuning_search import search
from trimaran.study.workspace import Workspace


@dataclass(frozen=True)
class Tuned:
    """The answer: the winner, every row in the order in which it came to be known, and how certain the winner is."""

    winner: Layout
    winning_row: Measurement
    rows: tuple[Measurement, ...]
    verdict: Verdict
    cluster: Cluster


def tune_recipe(
    recipe: Recipe,
    workspace: Workspace,
    *,
    retry: frozenset[Status] = frozenset(),
    training: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    say: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Measure this recipe's layouts until the fastest is certain; resumes from the workspace's store.

    Trials whose stored status is in `retry` are run once more. Where a `training` is to follow, what it would be
    refused for is told before the first trial.
    Raises TrimaranError when nothing can be planned or no layout runs.
    """
    prepared = prepare(recipe, workspace, say, training=training)
    case, cluster, candidates = prepared.case, prepared.case.cluster, prepared.candidates
    # beside what is measured stands what was predicted before anything was
    predictions = {
        candidate.layout: Prediction(candidate.predicted_sec_per_it, candidate.predicted_mem_gib)
        for candidate in candidates
    }
    with Store(workspace.store) as store, launcher_of(recipe.sweep, cluster, say) as launcher:
        launcher.expect(max(nodes_of(candidate.layout, cluster.of_hosts) for candidate in candidates))
        repeat_noise = trial_noise(store.measurements(recipe=recipe.name, every_attempt=True))

        def note(candidate: Candidate, row: Measurement) -> None:
            candidate.row, candidate.noise = row, math.hypot(repeat_noise, step_noise(row))

        def measure(candidate: Candidate) -> None:
            (row,) = run_sweep(
                recipe, cluster, [candidate.layout], store, data_dir=prepared.data, work_dir=workspace.trials,
                launcher=launcher, predictions=predictions, variants=(recipe.variant,), retry=retry,
                on_progress=on_progress, say=say,
            )  # fmt: skip
            note(candidate, row)

        known, to_run = 0, []
        for candidate in candidates:
            row = kept_row(recipe, cluster, candidate.layout, store, variant=recipe.variant, retry=retry)
            if row is None:
                to_run.append(candidate)
            elif not candidate.stated:
                note(candidate, row)
                known += 1
        if known:
            say(f"{known} further candidates were measured before and are known")
        sweep = recipe.sweep
        # the stated ones first, then the fastest as far as can be said before anything is measured
        to_run.sort(key=lambda candidate: (not candidate.stated, candidate.predicted_sec_per_it))
        likely = [(candidate.layout, candidate.predicted_sec_per_it) for candidate in to_run[: sweep.max_trials]]
        if sentence := overlong(likely, sweep.steps, sweep.timeout_s):
            say(sentence)
        result = search(
            candidates, measure, min_trials=sweep.min_trials, max_trials=sweep.max_trials, margin=sweep.margin,
            learn=lambda tried: predict_anew(case, candidates, tried),
            on_verdict=on_verdict,
        )  # fmt: skip
    if (calibration := fitted(case, result.tried)) is not None:
        save_calibration(calibration, workspace.calibration)
    rows = tuple(candidate.row for candidate in result.tried if candidate.row is not None)
    best = result.verdict.best
    if best is None or best.row is None:
        raise _none_ran(recipe, result.tried, rows)
    return Tuned(best.layout, best.row, rows, result.verdict, cluster)


def _none_ran(recipe: Recipe, tried: Sequence[Candidate], rows: Sequence[Measurement]) -> TrimaranError:
    ends = ", ".join(f"{candidate.layout} {row.status}" for candidate, row in list(zip(tried, rows, strict=True))[:4])
    first = rows[0]
    return TrimaranError(
        f"none of {recipe.name}'s {len(rows)} layouts that were tried ran ({ends}); first: {first.reason}; "
        f"mend that and run again with --retry {first.status}"
    )
