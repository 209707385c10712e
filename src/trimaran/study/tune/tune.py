"""Study: a recipe tuned for real - plan, measure, learn, until the fastest layout is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trimaran.bench.launch.network.launcher import require_shaping
from trimaran.bench.registry import launcher_of
from trimaran.bench.sweep import Prediction, Progress, run_sweep
from trimaran.bench.trial.trial import prepare_trial
from trimaran.cost.calibration import Calibration, resolve_calibration, save_calibration
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.fit.fit_rows import fit_observations
from trimaran.cost.fit.solve import Observation
from trimaran.layout.layout import Layout, resolve_split
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement, Status
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.shaped_network import ShapedNetwork
from trimaran.planner.planner import plan_with
from trimaran.planner.search.settings import PlanSettings
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store
from trimaran.store.compare import timed_steps
from trimaran.study.tune.choose import Candidate, Verdict
from trimaran.study.tune.search import Found, Outlook, search
from trimaran.study.tune.surrogate import NOISE_STD
from trimaran.study.workspace import (
    Workspace,
    check_stated_layouts,
    require_own_trainer,
    require_torch,
    stated_layouts,
    unprobed_machine,
)

# With fewer rows a fit says less than the prior.
LEAST_ROWS_TO_FIT = 4
# No fit is trusted below the run-to-run noise of a trial, however well it meets a few rows.
LEAST_ERROR = 0.03
# Layouts of the plan that the search may choose from, besides those that the recipe states.
PLANNED = 100


@dataclass(frozen=True)
class Tuned:
    """What tuning found: the winner, every row in the order in which it came to be known, and how certain it is."""

    winner: Layout
    winning_row: Measurement
    rows: tuple[Measurement, ...]
    verdict: Verdict
    cluster: Cluster


def tune(
    recipe: Recipe,
    workspace: Workspace,
    *,
    retry: frozenset[Status] = frozenset(),
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    say: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Measure this recipe's layouts until the fastest is certain; resumes from the workspace's store.

    Trials whose stored status is in `retry` are run once more.
    Raises TrimaranError when nothing can be planned or no layout runs.
    """
    require_own_trainer(recipe)
    if len(recipe.sweep.variants) > 1:
        raise TrimaranError(
            f"sweep.variants has {len(recipe.sweep.variants)} entries, and tune compares layouts under one: "
            f"bench measures all, then leave the best"
        )
    network = _only_network(recipe)
    if recipe.cluster is None and not workspace.cluster_file.exists():
        # What no machine of as many slots could run is told before a probe, which takes a while.
        nowhere = unprobed_machine(recipe) if network is None else unprobed_machine(recipe).on(network)
        candidates_of(recipe, nowhere, resolve_calibration(nowhere, recipe.stack))
        say("probing this machine (matmul, memory, collectives)")
    cluster = workspace.cluster(recipe)
    if network is not None:
        cluster = cluster.on(network)
    calibration = resolve_calibration(cluster, recipe.stack)
    candidates, stated = candidates_of(recipe, cluster, calibration)
    require_torch("tune")
    say("preparing the text (done once)")
    data = workspace.data(recipe)
    say(f"{len(candidates)} candidate layouts, {stated} of them stated by the recipe")
    predictions = {
        c.layout: Prediction(sec_per_it=c.predicted_sec_per_it, mem_gib=c.predicted_mem_gib) for c in candidates
    }
    rows: dict[int, Measurement] = {}

    with Store(workspace.store) as store, launcher_of(recipe.sweep, cluster, say) as launcher:

        def measure(index: int) -> float | None:
            (row,) = run_sweep(
                recipe,
                cluster,
                [candidates[index].layout],
                store,
                data_dir=data,
                work_dir=workspace.trials,
                launcher=launcher,
                predictions=predictions,
                variants=(recipe.variant,),
                retry=retry,
                on_progress=on_progress,
            )
            rows[index] = row
            return row.sec_per_it if row.status == "ok" else None

        known = evidence_of(recipe, cluster, candidates[stated:], store, retry)
        rows |= {stated + index: row for index, row in known.items()}
        if known:
            say(f"{len(known)} further candidates were measured before and are known")
        again = trial_noise(store.measurements(recipe=recipe.name, every_attempt=True))
        found = search(
            candidates,
            measure,
            evidence={index: row.sec_per_it if row.status == "ok" else None for index, row in rows.items()},
            noise=lambda index: math.hypot(again, step_noise(rows[index])),
            first=sorted(range(stated), key=lambda index: candidates[index].predicted_sec_per_it),
            min_trials=recipe.sweep.min_trials,
            max_trials=recipe.sweep.max_trials,
            prior_error=calibration.time_error,
            margin=recipe.sweep.margin,
            learn=lambda seconds: learned(recipe, cluster, calibration, candidates, rows, seconds),
            on_verdict=on_verdict,
        )
    seen = observations(recipe, cluster, candidates, rows)
    if len(seen) >= LEAST_ROWS_TO_FIT:
        fitted = fit_observations(seen, [one.layout.label() for one in seen])
        save_calibration(fitted.calibration, workspace.calibration)
    return _tuned(candidates, found, rows, cluster, recipe)


def evidence_of(
    recipe: Recipe, cluster: Cluster, candidates: Sequence[Candidate], store: Store, retry: frozenset[Status]
) -> dict[int, Measurement]:
    """Stored rows of the very trials that the candidates would be, by candidate; those to run again left out."""
    nowhere = Path()
    found = {}
    for index, candidate in enumerate(candidates):
        trial = prepare_trial(
            recipe, cluster, candidate.layout, data_dir=nowhere, work_dir=nowhere, variant=recipe.variant
        )  # fmt: skip
        row = store.trial(trial.key)
        if row is not None and row.status not in retry:
            found[index] = row
    return found


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


def _only_network(recipe: Recipe) -> ShapedNetwork | None:
    """The recipe's network, where it states one: the fastest layout is another on every network."""
    networks = recipe.sweep.networks
    if len(networks) > 1:
        raise TrimaranError(
            f"sweep.networks has {len(networks)} networks, and each may have a fastest layout of its own: keep 1 to "
            f"tune for it, or measure all with bench"
        )
    require_shaping(networks)
    return networks[0] if networks else None


def candidates_of(recipe: Recipe, cluster: Cluster, calibration: Calibration) -> tuple[list[Candidate], int]:
    """The recipe's own layouts, then the plan's best, each once; and how many are the recipe's own.

    Raises TrimaranError for a stated layout that breaks a rule, or when nothing can be planned.
    """
    workload, stack = recipe.workload, recipe.stack
    check_stated_layouts(recipe, cluster)
    settings = PlanSettings(
        device_counts=recipe.sweep.devices,
        top=PLANNED,
        fixed=dict(recipe.sweep.fixed),
        mem_margin=recipe.sweep.mem_margin,
    )
    planned = plan_with(Case.of(workload, cluster, stack, calibration), settings)
    layouts = stated_layouts(recipe)
    own = {_resolved(layout, recipe) for layout in layouts}
    layouts += [entry.layout for entry in planned.entries]
    distinct: dict[Layout, Layout] = {}
    for layout in layouts:
        distinct.setdefault(_resolved(layout, recipe), layout)
    candidates = []
    for layout in distinct.values():
        predicted = estimate(Case.of(workload, cluster, stack, calibration), layout)
        candidates.append(Candidate(layout, predicted.sec_per_it, predicted.reported_mem_gib))
    return candidates, len(own)


def _resolved(layout: Layout, recipe: Recipe) -> Layout:
    return layout.model_copy(update={"stage_split": resolve_split(layout, recipe.workload, recipe.stack)})


def observations(
    recipe: Recipe, cluster: Cluster, candidates: Sequence[Candidate], rows: Mapping[int, Measurement]
) -> list[Observation]:
    """What was measured, as a fit sees it."""
    case = Case.of(recipe.workload, cluster, recipe.stack)
    return [
        Observation(case, candidates[index].layout, row.sec_per_it, row.mem_gib, row.date or "")
        for index, row in rows.items()
        if row.status == "ok"
    ]


def learned(
    recipe: Recipe,
    cluster: Cluster,
    calibration: Calibration,
    candidates: Sequence[Candidate],
    rows: Mapping[int, Measurement],
    seconds: Mapping[int, float],
) -> Outlook:
    """The candidates predicted anew by a calibration fitted to the rows so far."""
    if len(seconds) < LEAST_ROWS_TO_FIT:
        return Outlook(candidates, calibration.time_error)
    seen = observations(recipe, cluster, candidates, rows)
    fitted = fit_observations(seen, [one.layout.label() for one in seen]).calibration
    anew = []
    for candidate in candidates:
        predicted = estimate(Case.of(recipe.workload, cluster, recipe.stack, fitted), candidate.layout)
        anew.append(replace(candidate, predicted_sec_per_it=predicted.sec_per_it))
    return Outlook(anew, max(fitted.time_error, LEAST_ERROR))


def _tuned(
    candidates: list[Candidate], found: Found, rows: dict[int, Measurement], cluster: Cluster, recipe: Recipe
) -> Tuned:
    if found.best is None:
        ends = ", ".join(f"{candidates[index].layout} {row.status}" for index, row in list(rows.items())[:4])
        first = next(iter(rows.values()))
        told = (first.evidence or "no evidence").strip().splitlines()[0]
        raise TrimaranError(
            f"none of {recipe.name}'s {len(rows)} layouts that were tried ran ({ends}); first: {told}; "
            f"mend that and run again with --retry {first.status}"
        )
    return Tuned(
        winner=candidates[found.best].layout,
        winning_row=rows[found.best],
        rows=tuple(rows.values()),
        verdict=found.verdict,
        cluster=cluster,
    )
