"""What a tuning starts from: cluster, calibration, candidates and token files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trimaran.bench.launch.network.shaped_launcher import require_shaping
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.layout.layout import Layout, resolve_split
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.shaped_network import ShapedNetwork
from trimaran.planner.planner import plan_with
from trimaran.planner.search.settings import PlanSettings
from trimaran.recipe.recipe import Recipe
from trimaran.study.stated import check_stated_layouts, stated_layouts, unprobed_machine
from trimaran.study.torch_programs import require_devices, require_torch
from trimaran.study.tune.choose import Candidate
from trimaran.study.workspace import Workspace

# Layouts of the plan that the search may choose from, besides those that the recipe states.
PLANNED = 100


@dataclass(frozen=True)
class Prepared:
    """What is tuned and on which machine, the layouts to choose from, and the folder of token files."""

    case: Case
    candidates: list[Candidate]
    data: Path


def prepare(recipe: Recipe, workspace: Workspace, say: Callable[[str], None], *, training: bool) -> Prepared:
    """Everything that has to be there before the first trial, and before a `training` that is to follow.

    What cannot be tuned is told before a probe or a text is begun, which take a while. Raises TrimaranError.
    """
    if len(recipe.sweep.variants) > 1:
        raise TrimaranError(
            f"sweep.variants has {len(recipe.sweep.variants)} entries, and tune compares layouts under one: "
            f"bench measures all, then leave the best"
        )
    network = _only_network(recipe)
    if recipe.cluster is None and not workspace.cluster_file.exists():
        candidates_of(recipe, Case.of(recipe.workload, _on(unprobed_machine(recipe), network), recipe.stack))
        say("probing this machine (matmul, memory, collectives)")
    case = Case.of(recipe.workload, _on(workspace.cluster(recipe), network), recipe.stack)
    candidates = candidates_of(recipe, case)
    require_torch("tune")
    require_devices(recipe, case.cluster)
    say("preparing the text (done once)")
    data = workspace.data(recipe, follows="training" if training else "trials")
    stated = sum(candidate.stated for candidate in candidates)
    say(f"{len(candidates)} candidate layouts, {stated} of them stated by the recipe")
    return Prepared(case, candidates, data)


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


def _on(cluster: Cluster, network: ShapedNetwork | None) -> Cluster:
    return cluster if network is None else cluster.on(network)


def candidates_of(recipe: Recipe, case: Case) -> list[Candidate]:
    """The layouts that the recipe states, then the plan's best, each once.

    Raises TrimaranError for a stated layout that breaks a rule, or when nothing can be planned.
    """
    check_stated_layouts(recipe, case.cluster)
    sweep = recipe.sweep
    settings = PlanSettings(
        device_counts=sweep.devices, top=PLANNED, fixed=dict(sweep.fixed), mem_margin=sweep.mem_margin
    )  # fmt: skip
    planned = [entry.layout for entry in plan_with(case, settings).entries]
    candidates: dict[Layout, Candidate] = {}
    stated = stated_layouts(recipe)
    for number, layout in enumerate(stated + planned):
        split = layout.model_copy(update={"stage_split": resolve_split(layout, case.workload, case.stack)})
        if split not in candidates:
            predicted = estimate(case.given_to(layout), layout)
            candidates[split] = Candidate(
                layout, predicted.sec_per_it, predicted.reported_mem_gib, stated=number < len(stated)
            )
    return list(candidates.values())
