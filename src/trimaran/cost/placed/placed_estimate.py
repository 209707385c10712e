"""The estimate of one layout on nodes that differ, its ranks on given devices."""

from __future__ import annotations

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.estimates import Estimate, TimeParts
from trimaran.cost.grid import Ints
from trimaran.cost.memory.limit import memory_limit_gib
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.cost.placed.topology import devices_of
from trimaran.layout.layout import Layout


def placed_estimate(case: Case, layout: Layout, as_one: Estimate) -> Estimate:
    """What `as_one`, the estimate on nodes that are alike, becomes where the layout's ranks stand.

    Its memory stays; each stage has to fit on the least of the nodes that hold it. Raises TrimaranError where the
    cluster has not the devices.
    """
    cost = PlacedCost(case, layout)
    nodes, kinds = cost.cells(devices_of(cost.topology, layout.placed, layout.devices))
    parts, seconds = cost.parts(nodes, kinds)
    limits = stage_limits_gib(cost, nodes, layout.devices)
    fits = all(memory.total <= limit for memory, limit in zip(as_one.memory, limits, strict=True))
    return as_one.model_copy(update={"sec_per_it": seconds, "time": TimeParts(**parts), "fits": fits})


def stage_limits_gib(cost: PlacedCost, nodes: Ints, devices: int) -> list[float]:
    """GiB that a rank of each stage may use: the least of the nodes that its replicas stand on."""
    topology = cost.topology
    limits = np.array([float(memory_limit_gib(kind, np.array([devices]))[0]) for kind in topology.kinds])
    return [float(limits[topology.group_of[nodes[:, stage]]].min()) for stage in range(nodes.shape[1])]
