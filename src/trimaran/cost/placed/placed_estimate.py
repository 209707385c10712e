"""The estimate of one layout on nodes that differ, its ranks on given devices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.estimates import Estimate, TimeParts
from trimaran.cost.grid import Floats
from trimaran.cost.memory.limit import memory_limit_gib
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.cost.placed.topology import Topology, devices_of
from trimaran.layout.layout import Layout


def placed_estimate(case: Case, layout: Layout, as_one: Estimate) -> Estimate:
    """What `as_one`, the estimate on nodes that are alike, becomes where the layout's ranks stand.

    Its memory stays; each stage has to fit on the least of the nodes that hold it. Raises TrimaranError where the
    cluster has not the devices.
    """
    cost = PlacedCost(case, layout)
    nodes, kinds = cost.cells(devices_of(cost.topology, layout.placed, layout.devices))
    parts, seconds = cost.parts(nodes, kinds)
    limits = stage_limits(cost)
    fits = all(memory.total <= limit.gib for memory, limit in zip(as_one.memory, limits, strict=True))
    return as_one.model_copy(update={"sec_per_it": seconds, "time": TimeParts(**parts), "fits": fits})


class StageLimit(NamedTuple):
    """GiB that a rank of a stage may use, and the group of nodes that it stands on where that is least."""

    gib: float
    group: str


def stage_limits(cost: PlacedCost, margin: float = 0.0) -> list[StageLimit]:
    """What a rank of each stage may use where it stands, such a share of it left free."""
    topology, layout = cost.topology, cost.layout
    limits = group_limits_gib(topology, layout.devices, margin)
    group_of = topology.group_of[topology.node_of[devices_of(topology, layout.placed, layout.devices)]]
    stage_of = cost.rank_cells % layout.pp
    least = [min(set(group_of[stage_of == stage].tolist()), key=limits.__getitem__) for stage in range(layout.pp)]
    return [StageLimit(float(limits[group]), topology.names[group]) for group in least]


def group_limits_gib(topology: Topology, ranks: int, margin: float = 0.0) -> Floats:
    """GiB that each of so many ranks may use on the nodes of each group, such a share of it left free."""
    return np.array([float(memory_limit_gib(kind, np.array([ranks]), margin)[0]) for kind in topology.kinds])
