"""Bound: seconds that no placement of a layout can be below."""

from __future__ import annotations

import numpy as np

from trimaran.cost.grid import Bools, Floats
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.cost.placed.topology import Topology
from trimaran.planner.placement.blocks import Blocks

# Rate (gigabit/s; 0: inside a node) and delay (microseconds).
Way = tuple[float, float]


def least_seconds(cost: PlacedCost, blocks: Blocks) -> float:
    """Seconds that no placement can be below, the optimizer's step apart as in PlacedCost.score.

    Every cell on the best nodes of all, every send and ring on the best links that there are. Where no group has room
    for all cells, either some replica's pipeline crosses between two groups, or all pipelines stay inside of groups and
    then every stage's ring crosses: the best link between groups is on the one or on the other, whichever costs less.
    """
    topology, layout = cost.topology, cost.layout
    replicas, stages = layout.dp, layout.pp
    groups, room = len(topology.kinds), int(np.bincount(blocks.node).max())
    apart = ~np.eye(groups, dtype=np.bool_)
    usable = apart | np.diag(np.bincount(topology.group_of, minlength=groups) > 1)
    best = cost.fastest_kind()
    near: Way = (0.0, 0.0) if room > 1 else _best_way(topology, usable, cost.cell_ranks)
    nodes = -(-replicas // room)
    ring: Way = (0.0, 0.0) if nodes == 1 else _best_way(topology, usable, layout.tp)
    pipeline = cost.pipeline_seconds([best] * stages, [near] * (stages - 1))
    easy = _followed(cost, best, pipeline, ring, replicas / nodes)
    if int(np.bincount(blocks.group).max()) >= replicas * stages:
        return easy
    far = _best_way(topology, apart, cost.cell_ranks)
    across = [[near] * at + [far] + [near] * (stages - 2 - at) for at in range(stages - 1)]
    pipes = (cost.pipeline_seconds([best] * stages, ways) for ways in across)
    crossing = [_followed(cost, best, pipe, ring, replicas / nodes) for pipe in pipes]
    if replicas > 1:
        # a ring that leaves a group comes back: two such delays at least
        gbps, delay = _best_way(topology, apart, layout.tp)
        spread = max(nodes, 2)
        crossing.append(_followed(cost, best, pipeline, (gbps, 2.0 * delay / spread), replicas / spread))
    return max(easy, min(crossing, default=easy))


def _best_way(topology: Topology, among: Bools, streams: int) -> Way:
    """The largest rate and the smallest delay of any way, each by its slower direction, that so many streams share."""
    gbps = np.minimum(topology.gbps, topology.gbps.T)[among].max(initial=0.0)
    delay = np.maximum(topology.delay_us, topology.delay_us.T)[among].min(initial=np.inf)
    return (min(float(gbps), float(topology.port_gbps.max())) / streams, float(delay)) if gbps > 0 else (0.0, 0.0)


def _followed(cost: PlacedCost, kind: int, pipeline: Floats, ring: Way, inside: float) -> float:
    """Seconds of stages that end as `pipeline` says, each followed by the agreement over such a ring."""
    agreed = [cost.ring_seconds(kind, stage, *ring, inside) for stage in range(len(pipeline))]
    return float((pipeline + np.array(agreed)).max())
