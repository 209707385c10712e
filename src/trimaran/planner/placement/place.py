"""Place: the placement of one layout that a search finds, and what it is to be compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.layout.layout import Layout
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.placement.blocks import Blocks
from trimaran.planner.placement.bound import least_seconds
from trimaran.planner.placement.improve import Walk
from trimaran.planner.placement.starts import starts

# Of the structured placements so many are improved, each by so many steps, cells counting: a walk that has been past
# every cell as often finds little more.
IMPROVED, STEPS_PER_CELL, MOST_STEPS = 3, 40, 4000
# Random placements, of which the one in the middle is what a layout takes that nobody has placed.
RANDOM = 21


@dataclass(frozen=True)
class Placed:
    """A layout with the device of each rank, seconds of its iteration, and of other placements of it.

    `least_s` is what no placement can be below; `in_order_s` has the ranks on the devices in their order, `random_s` is
    the median of random placements.
    """

    layout: Layout
    seconds: float
    least_s: float
    in_order_s: float
    random_s: float

    @property
    def gap(self) -> float:
        """By how much of itself the found time is above what no placement can be below, at most."""
        return 1.0 - self.least_s / self.seconds


def place(case: Case, layout: Layout, seed: int = 0, improved: int = IMPROVED) -> Placed:
    """The best placement found of a layout on the case's cluster.

    Raises TrimaranError where the nodes have no room for its cells: a TP x CP group stands inside of a node, or on
    whole nodes.
    """
    cost = PlacedCost(case, layout)
    blocks = Blocks.of(cost.topology, cost.cell_ranks)
    cells = layout.dp * layout.pp
    if len(blocks) < cells:
        raise TrimaranError(
            f"{case.cluster.name} has room for {len(blocks)} groups of TP {layout.tp} x CP {layout.cp} ranks on nodes of "
            f"theirs, and DP {layout.dp} x PP {layout.pp} = {cells} are needed: lower a degree"
        )
    walk = Walk(cost, blocks, seed)
    begun = sorted(starts(cost.topology, blocks, layout, cost.message_bits), key=walk.value)
    found = [walk.improve(order, min(STEPS_PER_CELL * cells, MOST_STEPS)) for order in begun[:improved]]
    best = min(found, key=lambda one: one[1])[0]
    random = np.random.default_rng(seed)
    shuffled = [cost.seconds(blocks.nodes(layout, random.permutation(len(blocks)))) for _ in range(RANDOM)]
    after = cost.parts(blocks.nodes(layout, best))
    slack = after[1] - cost.score(blocks.nodes(layout, best))[0]
    return Placed(
        layout=layout.model_copy(update={"placed": blocks.placed(cost, best)}),
        seconds=after[1],
        least_s=least_seconds(cost, blocks) + slack,
        in_order_s=cost.seconds(blocks.nodes(layout, np.arange(len(blocks)))),
        random_s=float(np.median(shuffled)),
    )
