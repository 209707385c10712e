"""Measuring what a recipe states: each of its layouts, on every network and under every variant of its sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from trimaran.bench.launch.network.shaped_launcher import require_shaping
from trimaran.bench.launchers import launcher_of
from trimaran.bench.recorded import record_timeline
from trimaran.bench.sweep import Prediction, Progress, kept_row, overlong, run_sweep
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.columns import Status
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import counted
from trimaran.nouns.timeline import Timeline
from trimaran.nouns.variant import PLAIN
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store
from trimaran.study.stated import check_stated_layouts, require_trimaran_stack, stated_layouts
from trimaran.study.torch_programs import require_devices
from trimaran.study.workspace import Workspace

# Shows so many trials while its block runs, and takes what happens in them.
ShowTrials = Callable[[int], AbstractContextManager[Callable[[Progress], None]]]


def measure_recipe(
    recipe: Recipe,
    workspace: Workspace,
    *,
    show: ShowTrials,
    say: Callable[[str], None],
    retry: frozenset[Status] = frozenset(),
    soak: int = 0,
) -> list[Measurement]:
    """Rows of all layouts that the recipe's sweep states; trials that the store holds are kept, never repeated.

    `show` is entered once for each network; trials whose stored status is in `retry` are run once more; `soak` are
    steps that each trial makes beyond the recipe's. Raises TrimaranError for a layout that breaks a rule, before
    anything is made, and where the machine cannot be probed or the text not be read.
    """
    require_shaping(recipe.sweep.networks)
    recipe = recipe.model_copy(
        update={"sweep": recipe.sweep.model_copy(update={"steps": recipe.sweep.steps + soak})}
    )  # fmt: skip
    layouts = list(dict.fromkeys(stated_layouts(recipe)))
    machine = workspace.cluster(recipe)
    clusters = [machine.on(network) for network in recipe.sweep.networks] or [machine]
    for cluster in clusters:
        check_stated_layouts(recipe, cluster)
    require_devices(recipe, machine)
    data = workspace.data(recipe)
    variants = recipe.sweep.variants or (PLAIN,)
    rows: list[Measurement] = []
    with Store(workspace.store) as store:
        for cluster in clusters:
            predictions = predicted(recipe, cluster, layouts)
            to_run = [
                (layout, predictions[layout].sec_per_it)
                for layout in layouts
                for variant in variants
                if kept_row(recipe, cluster, layout, store, variant=variant, retry=retry) is None
            ]
            if sentence := overlong(to_run, recipe.sweep.steps, recipe.sweep.timeout_s):
                say(sentence)
            with (
                launcher_of(recipe.sweep, cluster, say) as launcher,
                show(len(layouts) * len(variants)) as on_progress,
            ):
                rows += run_sweep(
                    recipe, cluster, layouts, store, data_dir=data, work_dir=workspace.trials, launcher=launcher,
                    predictions=predictions, variants=variants, retry=retry, on_progress=on_progress, say=say,
                )  # fmt: skip
    return rows


def predicted(recipe: Recipe, cluster: Cluster, layouts: Sequence[Layout]) -> dict[Layout, Prediction]:
    """What the cost model says of each layout before it is run. Raises TrimaranError for an invalid one."""
    case = Case.of(recipe.workload, cluster, recipe.stack)
    estimates = {layout: estimate(case.given_to(layout), layout) for layout in layouts}
    return {layout: Prediction(told.sec_per_it, told.reported_mem_gib) for layout, told in estimates.items()}


def require_one_ran(rows: Sequence[Measurement]) -> None:
    """Raise TrimaranError, with the first reason, when not one of the measured layouts ran."""
    if any(row.status == "ok" for row in rows):
        return
    first = rows[0]
    raise TrimaranError(
        f"none of {len(rows)} layouts ran; {first.layout_label} ended as {first.status}: {first.reason}; "
        f"mend that and run again with --retry {first.status}"
    )


def measure_timeline(recipe: Recipe, workspace: Workspace, layout: Layout, *, say: Callable[[str], None]) -> Timeline:
    """Who did what when in the last step of a trial of this layout. Raises TrimaranError where it does not run."""
    require_trimaran_stack(recipe)
    say(f"running {counted(recipe.sweep.steps, 'step')} with {layout}")
    cluster = workspace.cluster(recipe)
    require_devices(recipe, cluster)
    data = workspace.data(recipe)
    with Store(workspace.store) as store:
        return record_timeline(
            recipe, cluster, layout, store, data_dir=data, work_dir=workspace.folder / "timelines", say=say
        )
