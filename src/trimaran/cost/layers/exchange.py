"""Exchanges of tokens between the ranks that share out a layer's experts: bytes that cross each link, and seconds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, Ints, LayoutGrid, among
from trimaran.cost.network import Group, Network, expert_group
from trimaran.cost.shapes import token_slices
from trimaran.layout.choices import CHOICE
from trimaran.nouns.dispatcher import DISPATCHERS, Dispatcher
from trimaran.nouns.model import Model
from trimaran.operators.mixture import share_met
from trimaran.operators.operator import Operator, Phase

# In place of a dispatcher's index in a grid: tokens come to their experts for nothing, as bounds have it.
FREE = -1


class Exchanges:
    """Seconds of operators' dispatches, combines and gathers of experts' inputs under each layout of a grid.

    `inverse` is each layout's shape.
    """

    def __init__(self, case: Case, grid: LayoutGrid, inverse: Ints) -> None:
        self._case, self._grid, self._inverse = case, grid, inverse
        self._network = Network(case.cluster, case.calibration)
        self._ranks = expert_group(grid, case.cluster, "ep")
        self._slices = expert_group(grid, case.cluster, "etp")
        self._both = expert_group(grid, case.cluster, "etp", "ep")
        kinds = enumerate(DISPATCHERS[word] for word in CHOICE["dispatcher"].words)
        self._at_once = among(grid.dispatcher, [index for index, each in kinds if each.gathers or each.merges])
        self._exchanges = np.where(self._at_once, self._both.ranks, self._ranks.ranks) > 1.0
        self._copies: dict[str, tuple[Floats, Floats]] = {}

    def seconds(self, operators: Iterable[Operator], phase: Phase) -> Floats:
        """What the operators exchange in one phase, one after the other."""
        total = np.zeros(len(self._grid))
        for operator in operators:
            for collective in operator.collectives:
                if collective.phase != phase or collective.axis in ("tp", "cp"):
                    continue
                size = np.asarray(collective.size)[self._inverse]
                if (collective.kind, phase) == ("dispatch", "forward"):
                    total = total + self._waited()
                if collective.axis == "etp":
                    total = total + self._between_slices(size)
                else:
                    total = total + self._exchanged(size)
        return total

    def _between_slices(self, size: Floats) -> Floats:
        """Seconds in which the parts of each expert are given the copies that came to one of them, `size` bytes in all.

        Where tokens are gathered in place of copies, or copies merge, they come to all of them at once.
        """
        brought = self._at_once | (self._grid.dispatcher == FREE)
        return np.where(brought, 0.0, self._network.all_gather(size, self._slices))

    def _exchanged(self, size: Floats) -> Floats:
        """Seconds in which every rank sends its tokens, `size` bytes of them, to those of their experts."""
        seconds = np.zeros(len(self._grid))
        for index, word in enumerate(CHOICE["dispatcher"].words):
            chosen = (self._grid.dispatcher == index) & self._exchanges
            if chosen.any():
                each = self._by(DISPATCHERS[word], size)
                seconds = np.where(chosen, each, seconds)
        return seconds

    def _waited(self) -> Floats:
        """Seconds in which a device waits for what its host launches once it knows how many tokens arrive."""
        case, operators = self._case, np.array([DISPATCHERS[word].waited for word in CHOICE["dispatcher"].words])
        chosen = np.where(self._grid.dispatcher == FREE, 0.0, operators[self._grid.dispatcher])
        is_gpu = case.cluster.device.kind == "gpu"
        return np.where(self._exchanges, chosen, 0.0) * case.calibration.op_us * 1e-6 * is_gpu

    def _by(self, dispatcher: Dispatcher, size: Floats) -> Floats:
        """The same by one dispatcher.

        What gathers or merges does so among all ranks along EP and ETP (Megatron-Core 0.16.1, core/transformer/moe/
        token_dispatcher.py, lines 267 to 276 and 1346 to 1362: tp_ep_group); of what is gathered comes as much however
        busy experts are.
        """
        ranks, slices = self._ranks, token_slices(self._grid)
        if dispatcher.gathers:
            tokens = size / self._case.workload.expert_load * ranks.ranks * slices
            return self._network.all_gather(tokens, self._both)
        if dispatcher.name not in self._copies:
            among_these = (self._both, slices) if dispatcher.merges else (ranks, 1.0)
            self._copies[dispatcher.name] = copies(self._case.model, dispatcher, *among_these)
        inside, across = self._copies[dispatcher.name]
        per_node = np.minimum(self._grid.devices, self._case.cluster.devices_per_node)
        return self._network.all_to_all(size * inside, size * across, per_node, dispatcher.inside, dispatcher.across)


def copies(model: Model, dispatcher: Dispatcher, ranks: Group, cut: Floats | float = 1.0) -> tuple[Floats, Floats]:
    """Copies of a token that leave its rank over the link inside a node and over the one between nodes.

    As a router in balance chooses, see `share_met`. Where copies merge, one crosses to each other node that has an
    expert of it, and one goes on from there to each rank that has: so many as each expert is `cut` over.
    """
    if not dispatcher.merges:
        each = model.top_k / ranks.ranks
        return each * (ranks.inside - 1.0), each * (ranks.ranks - ranks.inside)
    nodes, apart = ranks.ranks / ranks.inside, ranks.ranks / cut
    met_ranks, met_nodes = ranks.ranks * share_met(model, apart), nodes * share_met(model, np.minimum(nodes, apart))
    return met_ranks * (1.0 - 1.0 / ranks.inside), met_nodes * (1.0 - 1.0 / nodes)
