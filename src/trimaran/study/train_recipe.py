"""Training a recipe's model in its workspace, on a layout that is stated or the fastest that was measured there."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from trimaran.bench.launch.joined import Joined
from trimaran.bench.launch.network.shaped_launcher import network_variant, require_shaping
from trimaran.bench.trial.room import Shortage, shortage
from trimaran.cost.calibration import load_calibration
from trimaran.cost.case import Case
from trimaran.files.row_nouns import measured_workload
from trimaran.layout.axes import DEGREES
from trimaran.layout.choices import CHOICES
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import check_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.shaped_network import ShapedNetwork
from trimaran.nouns.text import counted
from trimaran.planner.planner import plan_with
from trimaran.planner.search.settings import settings_from
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store
from trimaran.study.torch_programs import require_devices
from trimaran.study.training.run import run_training
from trimaran.study.workspace import Workspace

# Shows so many steps while its block runs, and takes each line of the trainer's log.
ShowSteps = Callable[[int], AbstractContextManager[Callable[[dict[str, Any]], None]]]


def train_recipe(
    recipe: Recipe,
    workspace: Workspace,
    layout: Layout,
    *,
    show: ShowSteps,
    say: Callable[[str], None],
    cluster: Cluster | None = None,
    joined: Joined | None = None,
    resume: bool = False,
    trace_steps: int = 0,
) -> tuple[Measurement, Cluster]:
    """Train all of the recipe's steps; the row of the training, and the cluster that it ran on.

    `cluster` is the recipe's, or this machine, unless it is stated. `joined` is the place of this process among
    ranks that something else has started: rank 0 leads, and this does not return in the others. Raises
    TrimaranError as `run_training` does, and where the layout breaks a rule, finds no room or needs another number of
    ranks.
    """
    if joined and joined.world_size != layout.devices:
        raise TrimaranError(f"layout {layout} needs {layout.devices} ranks, but {joined.world_size} were started")
    if joined and layout.placed:
        raise TrimaranError(
            f"layout {layout} names the device of each rank, but torchrun or srun has numbered these ranks already: "
            f"start the training by itself, or leave on... out"
        )
    if joined and recipe.network:
        raise TrimaranError(
            f"network {recipe.network.name!r} is shaped around ranks that are started here, and torchrun or srun has "
            f"started these: start the training by itself, or leave [[sweep.networks]] out"
        )
    if joined and (recipe.variant.pin_cpus or recipe.variant.clock_ghz is not None):
        raise TrimaranError(
            f"sweep.variants states {'pin_cpus' if recipe.variant.pin_cpus else 'clock_ghz'}, which ranks get as they "
            f"are started here, and torchrun or srun has started these: start the training by itself, or leave it out"
        )
    if joined and joined.rank:
        joined.follow(recipe.variant)
    stated = cluster or recipe.cluster
    cluster = stated or workspace.cluster(recipe, [layout])
    if recipe.network and not cluster.shaped:
        require_shaping([recipe.network])
        cluster = cluster.on(recipe.network)
    check_layout(layout, recipe.workload, cluster, recipe.stack)
    if not joined:
        require_devices(recipe, cluster)
    # on how many machines ranks stand that others have started, no probe of this one says
    lack = _shortage(recipe, workspace, cluster, layout, joined) if stated or not joined else None
    if lack is not None and lack.certain:
        raise TrimaranError(lack.sentence)
    if lack is not None:
        say(lack.sentence)
    # a training that goes on has its first weights
    goes_on = recipe.train.model_copy(update={"init_from": None}) if resume else recipe.train
    data = workspace.data(recipe.model_copy(update={"train": goes_on}), follows="training")
    say(f"training {counted(recipe.train.steps, 'step')} with {layout}; log in {workspace.training}")
    with show(recipe.train.steps) as on_step:
        row = run_training(
            recipe, cluster, layout, data_dir=data, out_dir=workspace.training,
            resume=resume, among=joined, trace_steps=trace_steps, on_step=on_step, on_notice=say,
            layout_on=lambda devices: layout_on(recipe, workspace, cluster, layout, devices),
        )  # fmt: skip
    return row, cluster


def layout_on(recipe: Recipe, workspace: Workspace, cluster: Cluster, layout: Layout, devices: int) -> Layout:
    """The fastest planned layout on so many devices at most, for a training to go on that began on `layout`.

    The plan keeps its precision, what makes its loss another, and the recipe's own global batch; of replicas that train
    apart as many. Raises TrimaranError where there is none.
    """
    case = _case(recipe, workspace, cluster)
    held = {name: value for name, value in recipe.sweep.fixed.items() if name not in DEGREES}
    held |= {choice.name: getattr(layout, choice.name) for choice in CHOICES if not choice.exact}
    if layout.local_steps:
        held |= {name: getattr(layout, name) for name in ("dp", "shard", "zero_stage")}
    settings = settings_from(
        devices=devices, fixed={**held, "precision": layout.precision}, mem_margin=recipe.sweep.mem_margin, top=1
    )
    return plan_with(case, settings).best.layout


def _shortage(
    recipe: Recipe, workspace: Workspace, cluster: Cluster, layout: Layout, joined: Joined | None
) -> Shortage | None:
    elsewhere = recipe.sweep.slurm or recipe.sweep.ray or joined
    return shortage(_case(recipe, workspace, cluster), layout, here=elsewhere is None)


def _case(recipe: Recipe, workspace: Workspace, cluster: Cluster) -> Case:
    """The recipe on a cluster, as what was measured in the workspace has taught, if anything has."""
    known = load_calibration(str(workspace.calibration)) if workspace.calibration.exists() else None
    return Case.of(recipe.workload, cluster, recipe.stack, known)


def planned_layout(recipe: Recipe, cluster: Cluster) -> Layout:
    """The fastest planned layout of a recipe on a cluster. Raises TrimaranError where there is none."""
    settings = settings_from(fixed=dict(recipe.sweep.fixed), mem_margin=recipe.sweep.mem_margin, top=1)
    return plan_with(Case.of(recipe.workload, cluster, recipe.stack), settings).best.layout


def fastest_layout(recipe: Recipe, workspace: Workspace) -> Layout | None:
    """The fastest layout that was measured for this recipe's workload, if there is one."""
    fastest = min(_timed(recipe, workspace), key=lambda row: row.sec_per_it or 0.0, default=None)
    return None if fastest is None else parse_layout(fastest.layout_label or "")


def measured_before(recipe: Recipe, workspace: Workspace, trained: Measurement) -> Measurement | None:
    """The last trial of the layout that a training had, if it was measured for this recipe's workload."""
    of_layout = (row for row in reversed(_timed(recipe, workspace)) if row.layout_label == trained.layout_label)
    return next(of_layout, None)


def _timed(recipe: Recipe, workspace: Workspace) -> list[Measurement]:
    """Rows with a time for this recipe's workload, in the order in which they were measured.

    The store may hold rows of the same recipe from before its model, its batch or its cluster was changed.
    """
    if not workspace.store.exists():
        return []
    with Store(workspace.store) as store:
        rows = store.measurements(recipe=recipe.name)
    network = recipe.network
    variant = ";".join(filter(None, (recipe.variant_text(recipe.variant), network_variant(network))))
    return [
        row
        for row in rows
        if row.status == "ok"
        and row.sec_per_it
        and (row.variant or "") == variant
        and (network is None or _is_of(row, network))
        and (recipe.cluster is None or _is_on(row, recipe.cluster if network is None else recipe.cluster.on(network)))
        and measured_workload(row, recipe.workload)
    ]


def _is_on(row: Measurement, cluster: Cluster) -> bool:
    """Whether a row was measured on such devices and nodes, whatever the cluster is called."""
    of_host = cluster.of_hosts.devices_per_node
    used = min(row.devices or of_host, of_host)  # what a row says, but of placed ranks, whose nodes it names whole
    return (row.hardware or "") == cluster.device.name and row.devices_per_node in (used, of_host)


def _is_of(row: Measurement, network: ShapedNetwork) -> bool:
    """Whether a row's network had these delays and rates: one of the same name may have been changed since."""
    delay_ms, gbps = network.slowest
    stated = (row.network_delay_ms or 0.0, row.network_gbps or 0.0)
    return all(math.isclose(*pair, rel_tol=1e-9) for pair in zip(stated, (delay_ms, gbps), strict=True))
