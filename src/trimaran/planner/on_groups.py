"""A plan for a cluster of groups: layouts that look good on some view of it, each placed by a search, and ranked so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.placed.topology import Topology
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.entries import entry_of
from trimaran.planner.placement.place import Placing
from trimaran.planner.plan import Entry, Plan
from trimaran.planner.search.settings import PlanSettings

# Layouts taken from the plan of each view, and how many of all are improved beyond their best structured placement.
OF_EACH_VIEW, IMPROVED = 6, 2
# An entry that beats the first with at least this chance cannot be told apart from it.
_ALIKE = 0.25


def plan_on_groups(case: Case, settings: PlanSettings, plan_alike: Callable[[Case, PlanSettings], Plan]) -> Plan:
    """Layouts ranked by their best placement; `plan_alike` plans on a cluster of alike nodes.

    Candidates are the best layouts on views of the cluster as alike nodes: at its best, at its worst, and each group
    alone. Raises TrimaranError where none fits on any.
    """
    settings.objective.check(case.workload, case.cluster)
    plans = _view_plans(case, settings, plan_alike)
    placings = _placings(case, settings, [entry.layout for plan in plans for entry in plan.entries[:OF_EACH_VIEW]])
    if not placings:
        raise TrimaranError(
            f"no layout has a place on {case.cluster.name}: TP x CP ranks stand on one node, or on whole nodes of a "
            f"group; fix fewer choices"
        )
    for placing in placings[:IMPROVED]:
        placing.improve()
    placings.sort(key=lambda placing: placing.seconds)
    entries = _entries(case, settings, placings)
    alike = [entry for entry in entries if entry.rival_chance >= _ALIKE or entry.rank == 1]
    first = plans[0]
    return first.model_copy(
        update={
            "cluster": case.cluster.name,
            "devices": settings.devices or case.cluster.devices,
            "entries": entries,
            "measure": tuple(entry.layout for entry in alike[:4]),
            "cannot_tell_apart": len(alike),
            "evaluated": sum(plan.evaluated for plan in plans),
            "fitting": sum(plan.fitting for plan in plans),
            "nearest_unfit": None,
            "advice": None,
            "notes": (*first.notes, *_notes(case, settings, placings)),
        }
    )


def views(cluster: Cluster) -> list[Cluster]:
    """The cluster as alike nodes: at its best, at its worst, and each group alone that is not as another."""
    topology = Topology.of(cluster)
    kinds = topology.kinds
    best = max(kinds, key=lambda kind: max(kind.device.peak_tflops.values()))
    per_node = max(kind.devices_per_node for kind in kinds)
    plain = cluster.model_copy(update={"groups": (), "links": ()})
    at_best = plain.model_copy(
        update={
            "device": best.device.model_copy(update={"mem_gib": min(kind.device.mem_gib for kind in kinds)}),
            "devices_per_node": per_node,
            "nodes": cluster.devices // per_node,
            "intra": _best([kind.intra for kind in kinds]),
            "inter": Link(
                bandwidth_gbps=float(topology.gbps.max()),
                latency_us=float(topology.delay_us[topology.gbps > 0].min()),
            ),
        }
    )
    alone = [kind for kind in kinds if kind is not cluster]
    return list({repr(view.model_copy(update={"name": ""})): view for view in (at_best, plain, *alone)}.values())


def _best(links: Sequence[Link]) -> Link:
    return Link(
        bandwidth_gbps=max(link.bandwidth_gbps for link in links), latency_us=min(link.latency_us for link in links)
    )


def _view_plans(case: Case, settings: PlanSettings, plan_alike: Callable[[Case, PlanSettings], Plan]) -> list[Plan]:
    """The plans of all views on which something fits; raises what the last one says where nothing does."""
    plans, nothing = [], None
    for view in views(case.cluster):
        devices = min(settings.devices or view.devices, view.devices)
        asked = settings.model_copy(update={"devices": devices, "top": max(settings.top, OF_EACH_VIEW)})
        try:
            plans.append(plan_alike(case.on(view), asked))
        except TrimaranError as error:
            nothing = error
    if not plans:
        assert nothing is not None
        raise nothing
    return plans


def _placings(case: Case, settings: PlanSettings, layouts: Sequence[Layout]) -> list[Placing]:
    """Each layout's search of placements, begun, the best first; without those that have no place or do not fit."""
    begun = []
    for layout in dict.fromkeys(layouts):
        try:
            placing = Placing(case, layout)
        except TrimaranError:
            continue  # more ranks to a TP group than any node has room for
        if placing.fits(settings.mem_margin):
            begun.append(placing)
    return sorted(begun, key=lambda placing: placing.seconds)


def _entries(case: Case, settings: PlanSettings, placings: Sequence[Placing]) -> tuple[Entry, ...]:
    error = case.calibration.time_error
    entries = []
    for index, placing in enumerate(placings[: settings.top]):
        ratio = placing.seconds / placings[0].seconds
        chance = 1.0 if index == 0 else 0.5 * math.erfc(math.log(ratio) / max(error, 1e-9) / math.sqrt(2.0))
        entries.append(entry_of(index + 1, placing.best, case, estimate(case, placing.best), chance, 1))
    return tuple(entries)


def _notes(case: Case, settings: PlanSettings, placings: Sequence[Placing]) -> list[str]:
    """What the placement is worth, how far from the best it can be, and what stays idle."""
    best = placings[0].placed()
    least = min(placing.least_s for placing in placings)
    notes = [
        f"ranks of {best.plain} stand where a search put them: {best.seconds:.4g} s; on the devices in their order "
        f"{best.in_order_s:.4g} s, at random {best.random_s:.4g} s; no placement of the layouts weighed takes less "
        f"than {least:.4g} s"
    ]
    topology = Topology.of(case.cluster)
    used = np.bincount(
        topology.group_of[topology.node_of[list(best.layout.placed)]], minlength=len(topology.kinds)
    ).tolist()
    held = np.bincount(topology.group_of[topology.node_of], minlength=len(topology.kinds)).tolist()
    idle = [
        f"{has - uses} of {has} in {name}"
        for name, uses, has in zip(topology.names, used, held, strict=True)
        if uses < has
    ]
    asked = settings.devices or case.cluster.devices
    if idle and best.layout.devices < asked:
        larger = (placing for placing in placings if placing.layout.devices > best.layout.devices)
        more = next(larger, None)
        instead = f"; {more.layout.devices} devices would take {more.seconds:.4g} s" if more else ""
        notes.append(f"{best.layout.devices} of {asked} devices are used, idle are {', '.join(idle)}{instead}")
    return notes
