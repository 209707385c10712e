"""Place: the placement of one layout that a search finds, and what it is to be compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, Ints
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.cost.placed.topology import devices_of
from trimaran.layout.layout import Layout
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.placement.balance import balanced
from trimaran.planner.placement.blocks import Blocks
from trimaran.planner.placement.bound import least_seconds
from trimaran.planner.placement.deal import dealt, may_be_dealt, pipeline_seconds
from trimaran.planner.placement.improve import Walk
from trimaran.planner.placement.room import Room
from trimaran.planner.placement.starts import starts

# Of the structured placements so many are improved, each by so many steps, cells counting: a walk that has been past
# every cell as often finds little more.
IMPROVED, STEPS_PER_CELL, MOST_STEPS = 2, 24, 3000
# Of so many of the best orders micro-batches are dealt out to replicas, and of these so many are weighed whole.
DEALT, WEIGHED = 8, 3
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
    def plain(self) -> Layout:
        """The layout without its placement."""
        return self.layout.model_copy(update={"placed": ()})

    @property
    def gap(self) -> float:
        """By how much of itself the found time is above what no placement can be below, at most."""
        return max(0.0, 1.0 - self.least_s / self.seconds)


class Placing:
    """The search of a placement of one layout: begun with the structured ones, to be improved from there.

    A share of each device's memory, the `margin`, is left free. With `prices` of a device of each group, shape (g,),
    the cheapest is searched, and not the fastest. Raises TrimaranError where the nodes have no room for its cells: a TP
    x CP group stands inside of a node, or on whole nodes.
    """

    def __init__(
        self, case: Case, layout: Layout, seed: int = 0, margin: float = 0.0, prices: Floats | None = None
    ) -> None:
        self.case, self.layout, self.seed, self.margin, self.prices = case, layout, seed, margin, prices
        self.cost = PlacedCost(case, layout)
        self.blocks = Blocks.of(self.cost.topology, self.cost.cell_ranks)
        cells = layout.dp * layout.pp
        if len(self.blocks) < cells:
            raise TrimaranError(
                f"{case.cluster.name} has room for {len(self.blocks)} groups of TP {layout.tp} x CP {layout.cp} ranks "
                f"on nodes of theirs, and DP {layout.dp} x PP {layout.pp} = {cells} are needed: lower a degree"
            )
        room = Room.of(case, layout, self.cost.topology, margin)
        self.walk = Walk(self.cost, self.blocks, room, seed, prices)
        orders = [*starts(self.cost.topology, self.blocks, layout, self.cost.message_bits, self.cost.ring_bits)]
        if not room.is_everywhere:
            orders.append(room.order(self.blocks, layout.dp))
        self.found = sorted(((self.walk.value(order), order) for order in orders), key=lambda one: one[0])

    def improve(self, steps: int = 0) -> None:
        """Walk on from the best structured placements, by so many steps each (0: as many as the cells are worth)."""
        if self.cost.layout.devices == 1:
            return
        steps = steps or min(STEPS_PER_CELL * self.layout.dp * self.layout.pp, MOST_STEPS)
        walked = [self.walk.improve(order, steps) for order in self._unlike(IMPROVED)]
        self.found = sorted([*((value, order) for order, value in walked), *self.found], key=lambda one: one[0])
        as_split = self.layout, self.cost, self._unlike(DEALT)
        self._balance()
        self._deal([as_split, (self.layout, self.cost, [self.order])])

    def deal(self) -> None:
        """Deal micro-batches out by the speed of replicas, where the stack may do so and it is faster and fits."""
        self._deal([(self.layout, self.cost, self._unlike(DEALT))])

    def _unlike(self, most: int) -> list[Ints]:
        """The best orders so far that differ in their value, at most so many."""
        unlike = {f"{value:.9g}": order for value, order in reversed(self.found)}
        return list(reversed(unlike.values()))[:most]

    def _deal(self, begun: Sequence[tuple[Layout, PlacedCost, list[Ints]]]) -> None:
        """Of layouts with orders of theirs take the one that is the fastest once micro-batches are dealt out."""
        if not may_be_dealt(self.case, self.layout):
            return
        deals = []
        for layout, cost, orders in begun:
            for order in orders:
                nodes = self.blocks.nodes(layout, order)
                batches = dealt(cost, nodes)
                unlike = layout.model_copy(update={"replica_batches": batches if len(set(batches)) > 1 else ()})
                deals.append((pipeline_seconds(cost, nodes, batches), unlike, order))
        deals.sort(key=lambda deal: deal[0])
        for _, unlike, order in deals[:WEIGHED]:
            self._take(unlike, order)

    def _balance(self) -> None:
        """Deal layers out by the speed of nodes, where they differ, the stack may do so and it is faster and fits."""
        layout, stack = self.layout, self.case.stack
        if layout.pp == 1 or layout.vpp > 1 or not stack.uneven_stages or len(set(self.cost.topology.kind_of)) == 1:
            return
        kinds = self.cost.topology.kind_of[self.cost.topology.group_of[self.blocks.nodes(layout, self.order)]]
        self._take(layout.model_copy(update={"stage_split": balanced(self.cost, kinds)}), self.order)

    def _take(self, layout: Layout, order: Ints) -> None:
        """Take a layout with such an order in place of the best so far, where it is faster and fits."""
        cost, room = PlacedCost(self.case, layout), Room.of(self.case, layout, self.cost.topology, self.margin)
        nodes = self.blocks.nodes(layout, order)
        if cost.seconds(nodes) * self.walk.price(nodes) < self.seconds * self.price and not room.excess(nodes):
            self.layout, self.cost = layout, cost
            self.walk = Walk(cost, self.blocks, room, self.seed, self.prices)
            self.found = [(self.walk.value(order), order)]

    @property
    def order(self) -> Ints:
        """The best order of blocks so far, the cells' first."""
        return self.found[0][1]

    @property
    def best(self) -> Layout:
        """The layout with the best placement so far."""
        return self.layout.model_copy(update={"placed": self.blocks.placed(self.cost, self.order)})

    @property
    def seconds(self) -> float:
        """Seconds of an iteration with the best placement so far."""
        return self._seconds(self.order)

    @property
    def price(self) -> float:
        """The price of a device where the best placement so far stands, on average; 1 without prices."""
        return self.walk.price(self.blocks.nodes(self.layout, self.order))

    @property
    def least_s(self) -> float:
        """Seconds that no placement can be below."""
        nodes = self.blocks.nodes(self.layout, self.order)
        after = self.seconds - self.cost.score(nodes)[0] * self.cost.scale
        return least_seconds(self.cost, self.blocks) * self.cost.scale + after

    @property
    def fits(self) -> bool:
        """Whether every stage has memory enough on its nodes, the margin left free."""
        return not self.excess

    @property
    def excess(self) -> float:
        """By which share of its limit the fullest stage is above it; 0 where all fit."""
        return self.walk.room.excess(self.blocks.nodes(self.layout, self.order))

    def placed(self) -> Placed:
        """What has been found so far, and what it is to be compared with."""
        cost, random = self.cost, np.random.default_rng(self.seed)
        shuffled = [self._seconds(random.permutation(len(self.blocks))) for _ in range(RANDOM)]
        ranks = devices_of(cost.topology, (), self.layout.devices)
        return Placed(
            layout=self.best,
            seconds=self.seconds,
            least_s=self.least_s,
            in_order_s=cost.seconds(*cost.cells(ranks)),
            random_s=float(np.median(shuffled)),
        )

    def _seconds(self, order: Ints) -> float:
        return self.cost.seconds(self.blocks.nodes(self.layout, order))


def place(case: Case, layout: Layout, seed: int = 0) -> Placed:
    """The best placement found of a layout on the case's cluster; raises TrimaranError where it has no place."""
    placing = Placing(case, layout, seed)
    placing.improve()
    return placing.placed()
