"""Improve: local search over placements, each step judged by the whole cost of what it makes."""

from __future__ import annotations

import math

import numpy as np

from trimaran.cost.grid import Floats, Ints
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.planner.placement.blocks import Blocks
from trimaran.planner.placement.room import Room

# At first a step that makes the iteration so much longer is taken about every third time; in the end none is.
_WARM = 0.02
# Pipelines and rings that a walk computes at most.
MOST_COMPUTED = 600
# What cells take on average counts so much beside what the slowest take: it tells equally slow placements apart.
_ON_AVERAGE = 0.05
# An order in which a cell does not fit counts as so many times as slow, the more it lacks: worse than any that fits.
_UNFIT = 1000.0


class Walk:
    """A walk over orders of blocks: two cells are swapped, or a cell and a free block, two stages, two replicas.

    With `prices` of a device of each group, shape (g,), it makes what an iteration costs small and not its time.
    """

    def __init__(
        self, cost: PlacedCost, blocks: Blocks, room: Room, seed: int = 0, prices: Floats | None = None
    ) -> None:
        self.cost, self.blocks, self.room, self.random = cost, blocks, room, np.random.default_rng(seed)
        self.prices = prices
        self.shape = cost.layout.dp, cost.layout.pp
        self.cells = self.shape[0] * self.shape[1]
        single = np.bincount(blocks.node)[blocks.node] == 1
        # blocks that nothing tells apart: alone on nodes of one group
        self.like = np.where(single, blocks.group, -1 - np.arange(len(blocks)))

    def value(self, order: Ints) -> float:
        """What the walk makes small, of an order whose first blocks are the cells'."""
        nodes = self.blocks.nodes(self.cost.layout, order)
        slowest, mean = self.cost.score(nodes)
        seconds = (slowest + _ON_AVERAGE * mean) * self.price(nodes)
        excess = 0.0 if self.room.is_everywhere else self.room.excess(nodes)
        return seconds * (1.0 + _UNFIT * (1.0 + excess)) if excess else seconds

    def price(self, nodes: Ints) -> float:
        """The price of a device, on average over cells on such nodes (dp, pp); 1 without prices."""
        return 1.0 if self.prices is None else float(self.prices[self.cost.topology.group_of[nodes]].mean())

    def improve(self, order: Ints, steps: int) -> tuple[Ints, float]:
        """The best order found in so many steps from this one, and its value: annealing that cools to nothing."""
        here = self.value(order)
        best, least = order, here
        enough = self.cost.computed + MOST_COMPUTED
        for step in range(steps):
            if self.cost.computed > enough:
                break
            swapped = self._step(order)
            if swapped is None:
                continue
            there = self.value(swapped)
            warmth = _WARM * here * (1.0 - step / steps) ** 2
            if there <= here or (warmth > 0 and self.random.random() < math.exp((here - there) / warmth)):
                order, here = swapped, there
                if here < least:
                    best, least = order, here
        return best, least

    def _step(self, order: Ints) -> Ints | None:
        """A neighbour of an order, or None where the step would change nothing."""
        replicas, stages = self.shape
        kind = self.random.random()
        swapped = order.copy()
        grid = swapped[: self.cells].reshape(self.shape)
        if kind < 0.1 and stages > 1:
            one, other = self.random.choice(stages, 2, replace=False)
            grid[:, [one, other]] = grid[:, [other, one]]
        elif kind < 0.2 and replicas > 1:
            one, other = self.random.choice(replicas, 2, replace=False)
            begin = int(self.random.integers(stages))
            grid[[one, other], begin:] = grid[[other, one], begin:]
        elif kind < 0.3 and stages > 2:
            begin, end = np.sort(self.random.choice(stages + 1, 2, replace=False))
            grid[:, begin:end] = grid[:, begin:end][:, ::-1]
        else:
            one, other = int(self.random.integers(self.cells)), int(self.random.integers(len(order)))
            if self.like[order[one]] == self.like[order[other]]:
                return None
            swapped[[one, other]] = swapped[[other, one]]
        return None if np.array_equal(self.like[swapped[: self.cells]], self.like[order[: self.cells]]) else swapped
