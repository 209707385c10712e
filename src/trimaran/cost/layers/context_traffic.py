"""Keys and values on their way between ranks that share a sequence, and what of it attention hides."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Bools, Floats, Ints, LayoutGrid
from trimaran.cost.network import Network, group_along
from trimaran.operators.operator import Operator, Phase


class ContextTraffic:
    """Seconds of operators' exchanges over CP under each layout of a grid.

    `inverse` is each layout's shape; `seconds_of` gives an operator's forward and backward on every layout.
    """

    def __init__(
        self,
        case: Case,
        grid: LayoutGrid,
        inverse: Ints,
        seconds_of: Callable[[Operator], tuple[Floats, Floats]],
    ) -> None:
        self._case, self._grid, self._inverse, self._seconds_of = case, grid, inverse, seconds_of
        self._network = Network(case.cluster, case.calibration)
        self._ranks = group_along(grid, case.cluster, "cp")

    def shown(self, operators: Iterable[Operator], phase: Phase) -> Floats:
        """What is not hidden of the operators' exchanges in one phase."""
        total = np.zeros(len(self._grid))
        for operator in operators:
            for collective in operator.collectives:
                if collective.axis != "cp" or collective.phase != phase:
                    continue
                size = np.asarray(collective.size)[self._inverse]
                if not size.any():
                    continue
                if collective.kind == "ring":
                    seconds = self._round_a_ring(size, operator, phase)
                elif collective.kind == "all_gather":
                    seconds = self._network.all_gather(size * self._grid.cp, self._ranks)
                else:
                    seconds = self._turned(size)
                total = total + np.where(size > 0, seconds, 0.0)
        return total

    def _round_a_ring(self, size: Floats, operator: Operator, phase: Phase) -> Floats:
        """CP - 1 sends of `size` bytes, each beside a step of attention on what came before.

        Backward the gradients of keys and values, half of it, go one step further, home, with nothing beside them.
        """
        step = self._seconds_of(operator)[phase == "backward"] / self._grid.cp
        shown = (self._grid.cp - 1.0) * np.where(
            self._by_cores, self._passed_on(size), np.maximum(self._passed_on(size) - step, 0.0)
        )
        return np.asarray(shown if phase == "forward" else shown + self._passed_on(0.5 * size))

    @property
    def _by_cores(self) -> Bools:
        """Where ranks of one CPU node exchange through its memory: with the cores that compute, so beside nothing."""
        return ~self._ranks.crosses & self._case.on_cpu

    def _passed_on(self, size: Floats) -> Floats:
        """Every rank sends `size` bytes to the next: a step of a gather, where memory is what they go through."""
        ranks = self._ranks
        # A ring crosses each node's border once, with one rank's card.
        rivals = np.maximum(ranks.rivals, float(self._case.cluster.cards_per_node))
        _, sent = self._network.send(size, ranks.crosses, rivals)
        steps = np.maximum(ranks.ranks - 1.0, 1.0)
        return np.where(self._by_cores, self._network.all_gather(size * ranks.ranks, ranks) / steps, sent)

    def _turned(self, size: Floats) -> Floats:
        """Every rank keeps its own heads of `size` bytes and sends the others' away.

        Through memory they move as many bytes as where they scatter a sum of that size.
        """
        ranks = self._ranks
        inside, across = (ranks.inside - 1.0) / ranks.ranks, (ranks.ranks - ranks.inside) / ranks.ranks
        per_node = np.minimum(self._grid.devices, self._case.cluster.devices_per_node)
        turned = self._network.all_to_all(size * inside, size * across, per_node, 0.0, 0.0)
        return np.where(self._by_cores, self._network.all_gather(size, ranks), turned)
