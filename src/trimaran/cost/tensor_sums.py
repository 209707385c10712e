"""Collectives of tensor parallelism in one layer, and what of them the products beside them hide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import numpy as np

from trimaran.cost.grid import Floats, Ints, LayoutGrid
from trimaran.cost.network import Group, Network
from trimaran.nouns.stack import Stack
from trimaran.operators.operator import Operator, Phase, Product


class TensorSums:
    """Seconds of the collectives of operators under each layout of a grid, those of one size timed once.

    `inverse` is each layout's shape, `product_seconds` says how long a product takes on every layout.
    """

    def __init__(
        self,
        stack: Stack,
        grid: LayoutGrid,
        inverse: Ints,
        network: Network,
        ranks: Group,
        product_seconds: Callable[[Product], Floats],
    ) -> None:
        self._stack, self._grid, self._inverse = stack, grid, inverse
        self._network, self._ranks, self._product_seconds = network, ranks, product_seconds
        self._timed: dict[int, Floats] = {}

    def seconds(self, operators: Iterable[Operator], phase: Phase) -> Floats:
        """What the operators' ranks sum in one phase, one after the other."""
        sizes = [c.size for operator in operators for c in operator.collectives if c.phase == phase]
        for size in sizes:
            if id(size) not in self._timed:
                self._timed[id(size)] = self._network.all_reduce(np.asarray(size)[self._inverse], self._ranks)
        return reduce(np.add, (self._timed[id(size)] for size in sizes), np.zeros(len(self._inverse)))

    def shown(self, layer: Sequence[Operator]) -> tuple[Floats, Floats]:
        """What is not hidden of a layer's collectives, forward and backward."""
        forward, backward = self.seconds(layer, "forward"), self.seconds(layer, "backward")
        if self._stack.sums_behind_weights:
            backward = backward - self._behind_weights(layer)
        if self._stack.sums_behind_products:
            ahead, back = self._behind_products(layer)
            forward, backward = forward - ahead, backward - back
        return forward, backward

    def _behind_weights(self, layer: Sequence[Operator]) -> Floats:
        """What products for weights' gradients hide of the sums of inputs' gradients.

        Where a product's output is cut, its input's gradient is summed while the product for its weight runs; under
        sequence parallelism that is the reduce-scatter, and the all-gather, half of what moves, comes before both
        (Megatron-Core 0.15, tensor_parallel/layers.py, lines 514 to 555).
        """
        share = np.where(self._grid.sequence_parallel, 0.5, 1.0)
        hidden = np.zeros(len(self._inverse))
        for operator in _summing(layer, "backward"):
            summed = share * self.seconds([operator], "backward")
            hidden = hidden + np.minimum(summed, self._product_seconds(operator.backward[1]))
        return hidden

    def _behind_products(self, layer: Sequence[Operator]) -> tuple[Floats, Floats]:
        """What the products next to them hide of the other collectives, forward and backward.

        Under sequence parallelism a gather or a scatter of t pieces runs beside the product that takes or makes them,
        piece by piece: all but one piece of the shorter of the two is hidden. Inside a node alone (Transformer Engine
        2.9, module/layernorm_linear.py and linear.py: ub_overlap_ag, ub_overlap_rs).
        """
        grid = self._grid
        pieces = np.where(grid.sequence_parallel & ~self._ranks.crosses, 1.0 - 1.0 / grid.tp, 0.0)
        ahead, back = np.zeros(len(self._inverse)), np.zeros(len(self._inverse))
        for operator in _summing(layer, "backward"):  # gathers its input
            half = 0.5 * self.seconds([operator], "backward")
            ahead = ahead + pieces * np.minimum(half, self._product_seconds(operator.forward[0]))
        for operator in _summing(layer, "forward"):  # scatters its output, and gathers that output's gradient
            half = 0.5 * self.seconds([operator], "forward")
            ahead = ahead + pieces * np.minimum(half, self._product_seconds(operator.forward[0]))
            back = back + pieces * np.minimum(half, self._product_seconds(operator.backward[0]))
        return ahead, back


def _summing(layer: Sequence[Operator], phase: Phase) -> list[Operator]:
    """The operators that have collectives in a phase."""
    return [operator for operator in layer if any(collective.phase == phase for collective in operator.collectives)]
