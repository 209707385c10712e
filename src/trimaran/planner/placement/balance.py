"""Balance: the layers of each stage by the speed of the nodes that it stands on."""

from __future__ import annotations

import heapq

from trimaran.cost.grid import Ints
from trimaran.cost.placed.placed_cost import PlacedCost


def balanced(cost: PlacedCost, kinds: Ints) -> tuple[int, ...]:
    """The layers of each stage, one at least, such that the slowest stage is as fast as it can be.

    A layer more goes each time to the stage that is then the fastest with it, which is best for stages whose time grows
    with their layers. `kinds` of node have shape (dp, pp).
    """
    layer, ends = cost.stage_seconds(kinds)
    layers = [1] * len(layer)
    queue = [(float(end + 2.0 * each), stage) for stage, (each, end) in enumerate(zip(layer, ends, strict=True))]
    heapq.heapify(queue)
    for _ in range(cost.case.model.layers - len(layers)):
        seconds, stage = heapq.heappop(queue)
        layers[stage] += 1
        heapq.heappush(queue, (seconds + float(layer[stage]), stage))
    return tuple(layers)
