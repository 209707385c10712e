"""A plan for a cluster of groups: layouts that look good on some view of it, each placed by a search, and ranked so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, product

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.grid import Floats
from trimaran.cost.placed.topology import Topology
from trimaran.layout.flops import days_to_train
from trimaran.layout.layout import Layout
from trimaran.layout.places import mean_of_devices, places
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import figure
from trimaran.planner.entries import entry_of
from trimaran.planner.explain.bottleneck import placed_memory_sentence
from trimaran.planner.placement.blocks import Blocks
from trimaran.planner.placement.deal import may_be_dealt
from trimaran.planner.placement.place import Placing
from trimaran.planner.placement.room import Room
from trimaran.planner.plan import RIVAL_CHANCE, Entry, Plan
from trimaran.planner.search.batches import with_batch
from trimaran.planner.search.objective import Objective
from trimaran.planner.search.settings import PlanSettings
from trimaran.planner.unmet import WholeTraining, unmet_sentence
from trimaran.planner.views import views

# Layouts taken from the plan of each view, the best that have room of so many that are weighed, and how many of all are
# improved beyond their best structured placement.
OF_EACH_VIEW, WEIGHED, IMPROVED = 6, 100, 2
# Micro-batches of a replica that are enough to be dealt out evenly: one more or less is then a small part of them.
ENOUGH = 8
# A layout, and the global batch that it was found for.
Asked = tuple[Layout, int]


def plan_on_groups(case: Case, settings: PlanSettings, plan_alike: Callable[[Case, PlanSettings], Plan]) -> Plan:
    """Layouts ranked by their best placement; `plan_alike` plans on a cluster of alike nodes.

    Candidates are the best layouts on views of the cluster as alike nodes: at its best, with the most memory that a
    node has, at its worst, as sites, and each group alone. Raises TrimaranError where none has a place, or none fits
    there.
    """
    settings.objective.check(case.workload, case.cluster)
    plans = _view_plans(case, settings, plan_alike)
    asked = _unlike(case, [(entry.layout, entry.global_batch) for plan in plans for entry in plan.entries])
    placings = _placings(case, settings, asked)
    finer = _finer(case, settings, placings)
    for number, placing in enumerate(placings):
        if number < IMPROVED:
            placing.improve()
        else:
            placing.deal()
    placings = _ranked(case, settings, [*placings, *finer])
    entries = _entries(case, settings, placings)
    alike = [entry for entry in entries if entry.rival_chance >= RIVAL_CHANCE or entry.rank == 1]
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


def _view_plans(case: Case, settings: PlanSettings, plan_alike: Callable[[Case, PlanSettings], Plan]) -> list[Plan]:
    """The plans of all views on which something fits, each with the best that have room on the cluster itself.

    Raises TrimaranError, by what is said of nodes with the most memory, where nothing fits on any.
    """
    plans, nothing = list[Plan](), dict[float, TrimaranError]()
    least = min(kind.device.mem_gib for kind in Topology.of(case.cluster).kinds)
    for view, of_all in views(case.cluster):
        devices = min(settings.devices or view.devices, view.devices)
        # what needs no more than every device has, has room anywhere
        weighed = OF_EACH_VIEW if view.device.mem_gib <= least else WEIGHED
        asked = settings.model_copy(update={"devices": devices, "top": max(settings.top, weighed)})
        if of_all and not settings.device_counts:
            asked = asked.model_copy(update={"device_counts": (devices,)})
        try:
            found = plan_alike(case.on_nodes(view), asked)
        except TrimaranError as error:
            nothing.setdefault(view.device.mem_gib, error)
            continue
        have_room = (entry for entry in found.entries if _has_room(case, entry.layout, settings.mem_margin))
        kept = tuple(islice(have_room, OF_EACH_VIEW))
        plans.append(found.model_copy(update={"entries": kept or found.entries[:OF_EACH_VIEW]}))
    if not plans:
        most = max(nothing)
        raise TrimaranError(f"{nothing[most]}{_of_most_memory(case.cluster)}")
    return plans


def _of_most_memory(cluster: Cluster) -> str:
    """Which group's memory a refusal speaks of, where they have unlike ones."""
    if len({group.device.mem_gib for group in cluster.groups}) < 2:
        return ""
    return f"; of all groups {max(cluster.groups, key=lambda group: group.device.mem_gib).name} has the most memory"


def _has_room(case: Case, layout: Layout, margin: float) -> bool:
    """Whether some placement of a layout has memory enough for every stage."""
    topology = Topology.of(case.cluster)
    blocks = Blocks.of(topology, layout.tp * layout.cp)
    if len(blocks) < layout.dp * layout.pp:
        return False
    room = Room.of(case, layout, topology, margin)
    order = room.order(blocks, layout.dp)
    return room.is_everywhere or not room.excess(blocks.nodes(layout, order))


def _placings(case: Case, settings: PlanSettings, asked: Sequence[Asked]) -> list[Placing]:
    """Each layout's search of placements, begun, the best first; without those that have no place or do not fit.

    Raises TrimaranError where none is left.
    """
    begun = list(_begun(case, settings, asked))
    if not begun:
        raise TrimaranError(
            f"no layout has a place on {case.cluster.name}: TP x CP ranks stand on one node, or on whole nodes of a "
            f"group; fix fewer choices"
        )
    fitting = [placing for placing in begun if placing.fits]
    if not fitting:
        nearest = min(begun, key=lambda placing: placing.excess).best
        sentence = placed_memory_sentence(case, nearest, estimate(case, nearest), settings.mem_margin)
        raise TrimaranError(f"no layout fits on {case.cluster.name}; the nearest is {nearest}: {sentence}")
    return sorted(fitting, key=lambda placing: _value(settings.objective, placing))


def _unlike(case: Case, asked: Sequence[Asked]) -> list[Asked]:
    """Of layouts that differ in the order of their axes alone the first: a placement puts each rank anyway.

    Which ranks of experts sit next to each other follows from that order too, so that those all stay.
    """
    if case.model.experts:
        return list(asked)
    first = {(layout.model_copy(update={"placement": ()}), batch): (layout, batch) for layout, batch in reversed(asked)}
    return list(reversed(first.values()))


def _begun(case: Case, settings: PlanSettings, asked: Iterable[Asked]) -> Iterator[Placing]:
    """Each layout's search of placements, begun, but of those that have no place.

    Of the fastest one where time counts and of the cheapest where money does, of both under a budget.
    """
    objective, by_price = settings.objective, _prices(case.cluster)
    ways: list[Floats | None] = [by_price if objective.goal == "cost" else None]
    if objective.budget is not None and by_price is not None:
        ways = [None, by_price]
    for (layout, batch), prices in product(dict.fromkeys(asked), ways):
        at_batch = case.with_workload(with_batch(case.workload, batch))
        try:
            yield Placing(at_batch, layout, margin=settings.mem_margin, prices=prices)
        except TrimaranError:
            continue  # more ranks to a TP group than any node has room for


def _prices(cluster: Cluster) -> Floats | None:
    """The price of a device of each group; None where some state none, or all the same."""
    prices = [kind.price_per_device_hour for kind in Topology.of(cluster).kinds]
    return None if None in prices or len(set(prices)) == 1 else np.array(prices, dtype=np.float64)


def _finer(case: Case, settings: PlanSettings, placings: Sequence[Placing]) -> list[Placing]:
    """The layouts with smaller micro-batches, dealt out to replicas: where these are few, no deal is even."""
    if "mbs" in settings.fixed or len(set(Topology.of(case.cluster).kind_of.tolist())) == 1:
        return []
    known = {placing.layout for placing in placings}
    new = []
    for placing in placings:
        layout, batch = placing.layout, placing.case.workload.global_batch
        for times in (2, 4, 8):
            if layout.mbs % times or layout.micro_batches(batch) * times >= 2 * ENOUGH:
                continue
            halved = layout.model_copy(update={"mbs": layout.mbs // times})
            if halved not in known and may_be_dealt(placing.case, halved):
                new.append((halved, batch))
    finer = [placing for placing in _begun(case, settings, new) if placing.fits]
    for placing in finer:
        placing.deal()
    return finer


def place_among(objective: Objective, entries: Sequence[Entry], one: Entry, cluster: Cluster) -> int | None:
    """The place that an entry would have among those of a plan on groups; None behind the last of them.

    Ranks that it does not place stand on the devices in their order.
    """
    prices = _prices(cluster)

    def value(entry: Entry) -> float:
        placed = entry.layout.model_copy(update={"placed": entry.layout.placed or tuple(range(entry.devices))})
        price = 1.0 if prices is None else float(prices[[place.group for place in places(placed, cluster)]].mean())
        return _valued(objective, entry.devices, entry.sec_per_it, entry.global_batch, price)

    times = objective.times(np.array([value(entry) for entry in entries]), value(one))
    better = int(np.count_nonzero(times < 1.0 - 1e-6))
    return better + 1 if better < len(entries) else None


def _value(objective: Objective, placing: Placing) -> float:
    """What ranks a placed layout: smaller is better."""
    batch = placing.case.workload.global_batch
    return _valued(objective, placing.layout.devices, placing.seconds, batch, placing.price)


def _valued(objective: Objective, devices: int, seconds: float, batch: int, price: float) -> float:
    value = objective.value(np.array([seconds]), np.array([devices]), np.array([batch]))
    return float(value[0]) * (price if objective.goal == "cost" else 1.0)


def _ranked(case: Case, settings: PlanSettings, placings: Sequence[Placing]) -> list[Placing]:
    """Those that meet the deadline and the budget where they stand, the best first.

    Raises TrimaranError where none does.
    """
    objective = settings.objective
    met = [placing for placing in placings if not objective.limited or _meets(objective, placing)]
    if not met:
        trainings = [_whole(placing) for placing in placings]
        fastest = min(trainings, key=lambda training: training.days)
        cheapest = min(trainings, key=lambda training: training.cost or 0.0)
        what = f"no placed layout on {settings.devices or case.cluster.devices} devices"
        raise TrimaranError(unmet_sentence(objective, what, fastest, cheapest))
    unlike = {placing.best: placing for placing in met}
    return sorted(unlike.values(), key=lambda placing: _value(objective, placing))


def _whole(placing: Placing) -> WholeTraining:
    """A placed layout's training to its end."""
    layout, iterations = placing.best, placing.case.workload.iterations
    assert iterations is not None, "limits ask for tokens"
    price = mean_of_devices(layout, placing.case.cluster, lambda nodes: nodes.price_per_device_hour)
    days = days_to_train(placing.seconds, iterations)
    return WholeTraining(layout, days, None if price is None else days * 24.0 * layout.devices * price)


def _meets(objective: Objective, placing: Placing) -> bool:
    workload, cluster = placing.case.workload, placing.case.cluster
    price = mean_of_devices(placing.best, cluster, lambda nodes: nodes.price_per_device_hour)
    there = cluster.model_copy(update={"price_per_device_hour": price})
    counts = np.array([placing.layout.devices]), np.array([workload.global_batch])
    return bool(objective.meets(np.array([placing.seconds]), *counts, workload, there)[0])


def _entries(case: Case, settings: PlanSettings, placings: Sequence[Placing]) -> tuple[Entry, ...]:
    error, best = case.calibration.time_error, placings[0]
    entries = []
    for index, placing in enumerate(placings[: settings.top]):
        value = np.array([_value(settings.objective, placing)])
        ratio = float(settings.objective.times(value, _value(settings.objective, best))[0])
        chance = 1.0 if index == 0 else 0.5 * math.erfc(math.log(ratio) / max(error, 1e-9) / math.sqrt(2.0))
        predicted = estimate(placing.case, placing.best)
        entries.append(entry_of(index + 1, placing.best, placing.case, predicted, chance, 1))
    return tuple(entries)


def _notes(case: Case, settings: PlanSettings, placings: Sequence[Placing]) -> list[str]:
    """What the placement is worth, how far from the best it can be, and what stays idle."""
    best = placings[0].placed()
    least = min(placing.least_s for placing in placings)
    notes = [
        f"ranks of {best.plain} stand where a search put them: {figure(best.seconds, '.4g')} s; on the devices in "
        f"their order {figure(best.in_order_s, '.4g')} s, at random {figure(best.random_s, '.4g')} s; no placement of "
        f"the layouts weighed takes less than {figure(least, '.4g')} s"
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
        larger = [placing for placing in placings if placing.layout.devices > best.layout.devices]
        more = min(larger, key=lambda placing: placing.seconds, default=None)
        instead = f"; {more.layout.devices} devices would take {figure(more.seconds, '.4g')} s" if more else ""
        notes.append(f"{best.layout.devices} of {asked} devices are used, idle are {', '.join(idle)}{instead}")
    return notes
