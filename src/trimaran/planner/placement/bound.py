"""Bound: seconds that no placement of a layout can be below."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from trimaran.cost.grid import Bools, Floats
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.cost.placed.rings import Ring, Rings
from trimaran.cost.placed.topology import Topology
from trimaran.planner.placement.blocks import Blocks

# Rate (gigabit/s; 0: inside a node) and delay (microseconds).
Way = tuple[float, float]


def least_seconds(cost: PlacedCost, blocks: Blocks) -> float:
    """Seconds that no placement can be below, the optimizer's step apart as in PlacedCost.score.

    Every cell on the best nodes of all, every send and ring on the best links that there are. Where no group has room
    for all cells, either some replica's pipeline crosses between two groups, or all pipelines stay inside of groups and
    then a ring of every stage crosses: the best link between groups is on one of them, whichever costs less.
    """
    topology, layout = cost.topology, cost.layout
    replicas, stages = layout.dp, layout.pp
    groups, room = len(topology.kinds), int(np.bincount(blocks.node).max())
    apart = ~np.eye(groups, dtype=np.bool_)
    usable = apart | np.diag(np.bincount(topology.group_of, minlength=groups) > 1)
    best = cost.fastest_kind()
    near: Way = (0.0, 0.0) if room > 1 else _best_way(topology, usable, cost.cell_ranks)
    # all wait for the replica that takes the most micro-batches, and any of them may be the one that crosses
    most, fewest = int(cost.batches.max()), int(cost.batches.min())
    pipeline = cost.pipeline_seconds([best] * stages, [near] * (stages - 1), most)
    within = _best_rings(cost, room, usable, usable if replicas > room else None)
    easy = _followed(cost, best, pipeline, within)
    if int(np.bincount(blocks.group).max()) >= replicas * stages:
        return easy
    far = _best_way(topology, apart, cost.cell_ranks)
    across = [[near] * at + [far] + [near] * (stages - 2 - at) for at in range(stages - 1)]
    pipes = (cost.pipeline_seconds([best] * stages, ways, fewest) for ways in across)
    crossing = [_followed(cost, best, pipe, within) for pipe in pipes]
    if replicas > 1:
        crossing.append(_followed(cost, best, pipeline, _best_rings(cost, room, usable, apart)))
    return max(easy, min(crossing, default=easy))


def _best_way(topology: Topology, among: Bools, streams: int) -> Way:
    """The largest rate and the smallest delay of any way, each by its slower direction, that so many streams share.

    Of a cell of more ranks than a node has devices, as many as those go out of a node.
    """
    streams = min(streams, int(topology.per_node.max()))
    gbps = np.minimum(topology.gbps, topology.gbps.T)[among].max(initial=0.0)
    delay = np.maximum(topology.delay_us, topology.delay_us.T)[among].min(initial=np.inf)
    return (min(float(gbps), float(topology.port_gbps.max())) / streams, float(delay)) if gbps > 0 else (0.0, 0.0)


def _best_rings(cost: PlacedCost, room: int, usable: Bools, among: Bools | None) -> list[Rings]:
    """Rings of a stage of which no placement has better ones than the best of these for it.

    `room` cells fit on a node, `usable` are all ways between nodes; some ring of the stage has one `among` such ways,
    or None: it need not.
    """

    def rings(cells: int, streams: int, among: Bools | None) -> list[Ring]:
        if cells <= room and among is None:
            return [Ring(0.0, 0.0, float(cells))]
        return _crossing(cost.topology, cells, room, streams, usable, usable if among is None else among)

    ends = None
    if cost.sums_embedding:
        ends = Ring(0.0, 0.0, 2.0) if room > 1 else Ring(*_best_way(cost.topology, usable, cost.cell_ranks), 1.0)
    if cost.copies == 1 or cost.sharers == 1:
        return [Rings(ring, ring, ends) for ring in rings(cost.layout.dp, cost.layout.tp, among)]
    found: list[Rings] = []
    for sharing, copying in ((among, None), (None, among)):
        shared, copied = rings(cost.sharers, cost.layout.tp, sharing), rings(cost.copies, cost.cell_ranks, copying)
        found += [Rings(*both, ends) for both in product(shared, copied)]
    return list(dict.fromkeys(found))


def _crossing(topology: Topology, cells: int, room: int, streams: int, usable: Bools, among: Bools) -> list[Ring]:
    """Rings of so many cells of which one way is `among` these, over as many nodes as may be best.

    A ring that leaves a group comes back, so two of its delays are such, and the others those of any way. The longer of
    its steps by a tree are as many as the logarithm of its nodes: the fewest nodes may be best, all, or a power of two.
    """
    gbps, delay = _best_way(topology, among, streams)
    _, least = _best_way(topology, usable, streams)
    fewest = max(-(-cells // room), 2)
    nodes = {fewest, cells, *(2**power for power in range(cells.bit_length()) if fewest < 2**power < cells)}
    return [Ring(gbps, (2.0 * delay + (count - 2) * least) / count, cells / count) for count in sorted(nodes)]


def _followed(cost: PlacedCost, kind: int, pipeline: Floats, rings: Sequence[Rings]) -> float:
    """Seconds of stages that end as `pipeline` says, each followed by the agreement over the best such rings for it."""
    agreed = [min(cost.agreement_seconds(kind, stage, each) for each in rings) for stage in range(len(pipeline))]
    return float((pipeline + np.array(agreed)).max())
