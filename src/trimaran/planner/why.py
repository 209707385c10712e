"""Explain: why a layout ranks where it does, or why it falls out."""

from __future__ import annotations

from typing import Literal

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.effects.time_effects import TIME_PARTS
from trimaran.cost.estimate import estimate
from trimaran.cost.estimates import Estimate
from trimaran.cost.memory.limit import memory_limit_gib
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.cost.placed.placed_estimate import stage_limits
from trimaran.cost.placed.topology import differs
from trimaran.layout.axes import AXES, LEAST_TOKENS, PRODUCT_IN_WORDS
from trimaran.layout.choices import CHOICES
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout, stated_fields
from trimaran.layout.rules import violations
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.node_group import NodeGroup
from trimaran.nouns.noun import Noun, TrimaranError
from trimaran.nouns.text import figure
from trimaran.nouns.workload import Workload
from trimaran.planner.entries import entry_of
from trimaran.planner.explain.bottleneck import bottleneck, memory_sentence, placed_memory_sentence
from trimaran.planner.explain.kernel_notes import kernel_notes
from trimaran.planner.explain.measured_notes import measured_notes
from trimaran.planner.on_groups import place_among
from trimaran.planner.plan import Plan
from trimaran.planner.planner import plan_with, searched
from trimaran.planner.search.batches import batch_of, with_batch
from trimaran.planner.search.ranking import Ranking
from trimaran.planner.search.search import Search
from trimaran.planner.search.settings import PlanSettings
from trimaran.planner.search.space import FIXABLE
from trimaran.planner.sizes import on_devices

Verdict = Literal["ranked", "slower", "not searched", "does not fit", "refused"]
# Layouts among which a rank is given.
RANKED = 1000
# What plans print of every layout: a text that states all of it is one of theirs, and has nothing left to choose.
_OF_A_WHOLE_LAYOUT = {"dp", "tp", "pp", "mbs", "precision"}
# Choices that may be another in a search and mean the same beside what else a layout chooses.
_FOLLOW = frozenset({"etp", "schedule", "recompute_every"})
# Parts of an iteration that differ by less than this share of the best's time are not worth a sentence.
_WORTH_SAYING = 0.01


class Why(Noun):
    """One layout beside the best of a plan.

    `rank` among the first RANKED, of those that are searched; `reasons` are sentences, the most telling first. A
    layout that breaks a rule has no estimate. What the question left open was chosen as the search would.
    """

    layout: Layout
    verdict: Verdict
    rank: int | None
    reasons: tuple[str, ...]
    estimate: Estimate | None
    best: Layout
    best_estimate: Estimate


def explain(
    text: str,
    case: Case,
    settings: PlanSettings,
) -> Why:
    """Explain a layout in short notation, `dp8,tp4,pp12,mbs2`, beside the best that the settings allow.

    Choices that `text` leaves open are the best ones for what it states. Raises TrimaranError where the
    notation is not understood or no layout at all is left to compare with.
    """
    plan = plan_with(case, settings)
    if settings.devices is None and not settings.device_counts:
        # A layout may be asked about that needs more devices than are planned on where nobody says how many.
        stated = parse_layout(text).devices
        settings = settings.model_copy(
            update={"devices": plan.devices if stated <= plan.devices else case.cluster.devices}
        )
        plan = plan if stated <= plan.devices else plan_with(case, settings)
    asked = case.on(on_devices(case.cluster, plan.devices))
    layout = complete(text, asked, settings)
    best = plan.best
    workload, cluster, stack = asked.workload, asked.cluster, asked.stack
    workload = with_batch(workload, batch_of(workload, layout.dp * layout.mbs, settings.gbs_tolerance))
    broken = tuple(v.sentence for v in violations(layout, workload, cluster, stack))
    if not broken and layout.devices > plan.devices:
        broken = (
            f"{PRODUCT_IN_WORDS} = {layout.devices} devices, but at most {plan.devices} are allowed: raise devices",
        )
    if broken:
        return Why(
            layout=layout, verdict="refused", rank=None, reasons=broken, estimate=None, best=best.layout,
            best_estimate=best.estimate,
        )  # fmt: skip
    predicted = estimate(asked.with_workload(workload), layout, simulate=True)
    fits, memory = _memory(layout, asked, predicted, settings.mem_margin)
    far = settings.model_copy(update={"top": max(settings.top, RANKED)})
    passed_over = None
    if differs(cluster):
        one = entry_of(1, layout, asked.with_workload(workload), predicted, 1.0, 1)
        rank = place_among(settings.objective, plan.entries, one, cluster)
    else:
        search, ranking = searched(asked, far)
        # Where nothing fits a search offloads of its own accord, which is no choice that anybody holds.
        unasked = (search.proposer.space.fixed - set(far.fixed)) & {"offload"}
        passed_over = _passed_over(layout, workload, search, _FOLLOW | unasked)
        rank = None if passed_over else _rank(layout, workload, predicted, search, ranking)
    verdict: Verdict = "ranked" if rank else "not searched" if passed_over else "slower"
    reasons = [*([passed_over] if passed_over else []), *_beside_the_best(layout, predicted, plan)]
    if fits:
        reasons = [*reasons, f"memory: {memory}"]
    else:
        verdict, rank = "does not fit", None
        reasons = [memory, *reasons]
    reasons.append(f"bottleneck: {bottleneck(layout, asked.with_workload(workload), predicted)}")
    reasons += [f"measured: {note}" for note in measured_notes(layout, asked)]
    reasons += [f"kernels: {note}" for note in kernel_notes(layout, workload, cluster, stack)]
    return Why(
        layout=layout, verdict=verdict, rank=rank, reasons=tuple(reasons), estimate=predicted, best=best.layout,
        best_estimate=best.estimate,
    )  # fmt: skip


def complete(
    text: str,
    case: Case,
    settings: PlanSettings,
) -> Layout:
    """The layout that `text` means: what it states, the rest as the search would choose it.

    A layout as plans print it leaves out what has its default, and is whole. Else the choices are searched with no
    memory limit in the way if need be; where the statement alone breaks a rule they are the stack's plainest, so that
    the rule can say so.
    """
    stated, stack = stated_fields(text), case.stack
    if stated.keys() >= _OF_A_WHOLE_LAYOUT:
        # ZeRO 3 is fully sharded, of which a text by hand states one
        whole = parse_layout(text, {"dp_kind": "fully_sharded"} if stated.get("zero_stage") == 3 else None)
        if not any(violations(whole, case.workload, case.cluster, stack)):
            return whole
    fixed = {name: _fixable(value) for name, value in stated.items() if name in FIXABLE}
    cluster = case.cluster
    proposed = {c.name: c.proposes(case.workload, cluster, stack, cluster.devices) for c in CHOICES if c.proposes}
    plainest: dict[str, object] = {name: next(iter(values)) for name, values in proposed.items()}
    for margin in (settings.mem_margin, None):
        roomy = case
        if margin is None:
            roomy = case.on(_without_memory_limit(case.cluster))
            if "1f1b" in stack.schedules and "vpp" not in fixed:
                # With no limit nothing else would hold the search back from keeping every micro-batch in flight.
                fixed = {"schedule": "1f1b", **fixed}
        narrowed = settings.model_copy(
            update={"fixed": {**settings.fixed, **fixed}, "top": 1, "mem_margin": margin or 0.0}
        )
        try:
            chosen = plan_with(roomy, narrowed).best.layout
        except TrimaranError:
            continue
        return parse_layout(text, {**chosen.model_dump(), "stage_split": stated.get("stage_split", chosen.stage_split)})
    return parse_layout(text, plainest)


def _memory(layout: Layout, case: Case, predicted: Estimate, margin: float) -> tuple[bool, str]:
    """Whether a layout fits with such a share of memory left free, and the sentence about it."""
    if layout.placed or differs(case.cluster):
        limits = stage_limits(PlacedCost(case, layout), margin)
        fits = all(stage.total <= limit.gib for stage, limit in zip(predicted.memory, limits, strict=True))
        return fits, placed_memory_sentence(case, layout, predicted, margin)
    limit = float(memory_limit_gib(case.cluster, np.array([layout.devices]), margin)[0])
    return predicted.mem_gib <= limit, memory_sentence(predicted, limit, margin)


def _fixable(value: object) -> object:
    return "-".join(map(str, value)) if isinstance(value, tuple) else value


def _without_memory_limit(cluster: Cluster) -> Cluster:
    def freed(nodes: Cluster | NodeGroup) -> dict[str, object]:
        return {"device": nodes.device.model_copy(update={"mem_gib": 1e9}), "host_mem_gib": 0.0}

    groups = tuple(group.model_copy(update=freed(group)) for group in cluster.groups)
    return cluster.model_copy(update={**freed(cluster), "groups": groups})


def _passed_over(layout: Layout, workload: Workload, search: Search, but: frozenset[str]) -> str | None:
    """Why a search does not try what the layout chooses, where it does not; not asked of the choices `but`."""
    space, axes = search.proposer.space, {axis.name: axis for axis in AXES}
    for choice in CHOICES:
        tried, value = space.values.get(choice.name, ()), getattr(layout, choice.name)
        if not tried or not choice.distinct or choice.name in but or choice.index(value) in tried:
            continue
        title = axes[choice.name].title if choice.name in axes else choice.name
        if choice.name in space.fixed:
            held = ", ".join(str(choice.value(number)) for number in tried)
            return f"not searched: {title} is held at {held}, and is {value} here"
        least = f": CP {value} leaves a rank {workload.seq_len // layout.cp} tokens of a sequence, and a search "
        because = f"{least}{LEAST_TOKENS}" if choice.name == "cp" else ""
        return f"not searched{because}; --fix {choice.name}={value} searches {title} {value}"
    return None


def _rank(layout: Layout, workload: Workload, predicted: Estimate, search: Search, ranking: Ranking) -> int | None:
    """1 for the first, else 2 plus the number of better layouts behind it; None beyond those that were ranked."""
    seconds, devices, batch = np.array([predicted.sec_per_it]), np.array([layout.devices]), workload.global_batch
    value = float(search.objective.value(seconds, devices, np.array([batch]))[0])
    # Equal to seven digits is as good: the order of such layouts is by memory. The first may be a plainer one than
    # others that are a little faster, and stands before them.
    if abs(search.objective.times(np.array([value]), ranking.value[0])[0] - 1.0) <= 1e-6:
        return 1
    rank = 2 + int(np.count_nonzero(search.objective.times(ranking.value[1:], value) < 1.0 - 1e-6))
    return rank if rank <= len(ranking.value) or len(ranking.value) < search.top else None


def _beside_the_best(layout: Layout, predicted: Estimate, plan: Plan) -> list[str]:
    """What the layout loses to the best, and what it gains, by part of the iteration.

    What ranks that share layers, sequences or experts say to each other is told where the two share them differently.
    """
    best = plan.best.estimate
    ratio = predicted.sec_per_it / best.sec_per_it
    told = f"{figure(predicted.sec_per_it)} s/it, {ratio:.2f} times the {figure(best.sec_per_it)} s/it of "
    told += str(plan.best.layout)
    if abs(ratio - 1) <= _WORTH_SAYING:
        return [told]
    differences = {name: getattr(predicted.time, name) - getattr(best.time, name) for name in TIME_PARTS}
    order = sorted(differences, key=lambda name: -abs(differences[name]))
    shared = {axis for axis in ("tp", "cp", "ep") if getattr(layout, axis) != getattr(plan.best.layout, axis)}
    worth = {name: _WORTH_SAYING * best.sec_per_it * (name not in shared) for name in differences}
    telling = [name for name in order if abs(differences[name]) > worth[name]]
    parts = [f"{name} {differences[name]:+.3g} s" for name in telling]
    return [f"{told}: {', '.join(parts)}"]
