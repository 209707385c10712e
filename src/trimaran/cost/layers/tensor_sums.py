"""Collectives of tensor parallelism in one layer, and what of them the products beside them hide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from trimaran.cost.calibration import SLOWED_BY_TRAFFIC
from trimaran.cost.grid import Bools, Floats, Ints, LayoutGrid
from trimaran.cost.network import Group, Network
from trimaran.nouns.stack import Stack
from trimaran.operators.casts import Number
from trimaran.operators.operator import Collective, Operator, Phase, Product

# Transformer Engine 2.9, pytorch/module/base.py, initialize_ub: num_splits of what is scattered beside its product.
SCATTERED_PIECES = 4.0


def copied(stack: Stack, mbs: Ints) -> tuple[Bools, Bools]:
    """Whether sequence parallelism copies what it has gathered, and what it will scatter, of so many sequences.

    Slices of one sequence lie behind each other as they are gathered: a view is enough, where the software takes it.
    """
    kind, several = stack.concatenates_slices, (mbs > 1) & (stack.concatenates_slices != "never")
    return several | (kind == "always"), several | (kind in ("scatters", "always"))


class TensorSums:
    """Seconds of the collectives of operators under each layout of a grid, those of one size timed once.

    `inverse` is each layout's shape, `tp` that of each shape, `product_seconds` how long a product takes on every
    layout, `copy_seconds` how long a byte is read and written, shape (n,), `as_read` whether products read what is
    gathered for them as it is, of each shape or of all.
    """

    def __init__(
        self,
        stack: Stack,
        grid: LayoutGrid,
        inverse: Ints,
        network: Network,
        ranks: Group,
        tp: Floats,
        product_seconds: Callable[[Product], Floats],
        copy_seconds: Floats,
        as_read: Bools,
    ) -> None:
        self._stack, self._grid, self._inverse = stack, grid, inverse
        self._network, self._ranks, self._tp, self._product_seconds = network, ranks, tp, product_seconds
        self._as_read = np.broadcast_to(as_read, np.shape(tp))[inverse]
        sliced = copy_seconds * (grid.sequence_parallel & (grid.tp > 1))
        gathered, scattered = copied(stack, grid.mbs)
        self._copied_gathered, self._copied_scattered = sliced * gathered, sliced * scattered
        self._timed: dict[int, tuple[Number, Floats]] = {}

    def seconds(self, operators: Iterable[Operator], phase: Phase) -> Floats:
        """What the operators' ranks sum in one phase, one after the other."""
        collectives = [c for operator in operators for c in operator.collectives if c.phase == phase and c.axis == "tp"]
        return reduce(np.add, map(self._seconds, collectives), np.zeros(len(self._inverse)))

    def seconds_of_last(self, operators: Iterable[Operator]) -> Floats:
        """Seconds, one of each layout, that the last operators of a layer sum forward, of what their own layer leaves.

        Under sequence parallelism those are the scatters, half of the sums: what is gathered behind them is read by
        the next layer. Nothing of it may be hidden by the stack.
        """
        return np.where(self._grid.sequence_parallel, 0.5, 1.0) * self.seconds(operators, "forward")

    def _seconds(self, collective: Collective) -> Floats:
        stated = collective.size  # kept with its time, so that no later one has its id
        if id(stated) not in self._timed:
            size = np.asarray(stated)[self._inverse]
            if collective.kind == "all_gather":  # there is none where nothing is to be gathered
                seconds = np.where(size > 0, self._network.all_gather(size, self._ranks), 0.0)
                seconds = seconds + size * self._copied_gathered
            else:  # a scatter and a gather where anything is copied
                copied = self._copied_gathered + self._copied_scattered
                seconds = self._network.all_reduce(size, self._ranks) + size * copied
            self._timed[id(stated)] = stated, seconds
        return self._timed[id(stated)][1]

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

        Under sequence parallelism a gather of t pieces runs beside the product that takes them, and a scatter beside
        the one that makes them, SCATTERED_PIECES of them: all but one piece of the shorter of the two is hidden, and a
        product of so many pieces takes longer than one. Inside a node alone (Transformer Engine 2.9, module/base.py,
        initialize_ub: ring_exchange and pipeline; layernorm_linear.py and linear.py: ub_overlap_ag, ub_overlap_rs).
        What is cast between gather and product hides nothing of the gather (torch 2.6.0, _inductor/fx_passes/
        micro_pipeline_tp.py, find_all_gather_patterns).
        """
        grid = self._grid
        overlapped = grid.sequence_parallel & ~self._ranks.crosses & (grid.tp > 1)
        ahead, back = np.zeros(len(self._inverse)), np.zeros(len(self._inverse))
        if not overlapped.any():
            return ahead, back
        for operator in _summing(layer, "backward"):  # gathers its input
            gather, _ = self._halves(operator, "backward")
            ahead = ahead + self._as_read * self._hidden(gather, operator.forward[0], self._tp)
        for operator in _summing(layer, "forward"):  # scatters its output, and gathers that output's gradient
            gather, scatter = self._halves(operator, "forward")
            ahead = ahead + self._hidden(scatter, operator.forward[0], np.minimum(self._tp, SCATTERED_PIECES))
            back = back + self._as_read * self._hidden(gather, operator.backward[0], self._tp)
        return np.where(overlapped, ahead, 0.0), np.where(overlapped, back, 0.0)

    def _halves(self, operator: Operator, phase: Phase) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """What a product's sum moves as a gather and as a scatter, and what of either is copied: seconds."""
        summed = [c for c in operator.collectives if c.phase == phase and c.axis == "tp" and c.kind == "all_reduce"]
        sizes = reduce(np.add, (np.asarray(c.size)[self._inverse] for c in summed))
        copies = sizes * self._copied_gathered, sizes * self._copied_scattered
        moving = 0.5 * (reduce(np.add, map(self._seconds, summed)) - copies[0] - copies[1])
        return (moving, copies[0]), (moving, copies[1])

    def _hidden(self, half: tuple[Floats, Floats], product: Product, pieces: Floats) -> Floats:
        """Seconds that cutting a product's rows into pieces saves of what moves beside it; never less than none.

        Pieces lie where the product reads and leaves them, so nothing is copied. `pieces` is an array over shapes.
        """
        moving, copied = half
        whole, piece = self._product_seconds(product), self._product_seconds(replace(product, m=product.m / pieces))
        several = pieces[self._inverse]
        beside = np.minimum(moving, whole) * (1.0 - 1.0 / several) * (2.0 - SLOWED_BY_TRAFFIC)
        return np.asarray(np.maximum(beside + copied - (several * piece - whole), 0.0))


def _summing(layer: Sequence[Operator], phase: Phase) -> list[Operator]:
    """The operators that have collectives in a phase."""
    return [
        operator
        for operator in layer
        if operator.forward and any(c.phase == phase and c.axis == "tp" for c in operator.collectives)
    ]
