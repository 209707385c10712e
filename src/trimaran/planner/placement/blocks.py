"""Blocks: devices of a cluster that a cell of a layout, the ranks of one TP x CP group, may stand on together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.cost.grid import Ints
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.cost.placed.topology import Topology
from trimaran.layout.layout import Layout


@dataclass(frozen=True)
class Blocks:
    """b places for cells: the devices of each, shape (b, ranks of a cell), its node and its group, shape (b,)."""

    devices: Ints
    node: Ints
    group: Ints

    def __len__(self) -> int:
        return len(self.node)

    @classmethod
    def of(cls, topology: Topology, ranks: int) -> Blocks:
        """Runs of devices inside of nodes, or of whole nodes of a group where a cell has more ranks than a node."""
        runs: list[Ints] = []
        for group, kind in enumerate(topology.kinds):
            devices = np.flatnonzero(topology.group_of[topology.node_of] == group)
            per_node = kind.devices_per_node
            nodes = devices.reshape(-1, per_node)
            if ranks <= per_node:
                fit = per_node // ranks
                runs += [*nodes[:, : fit * ranks].reshape(-1, ranks)]
            elif ranks % per_node == 0:
                together = ranks // per_node
                whole = len(nodes) // together * together
                runs += [*nodes[:whole].reshape(-1, ranks)]
        held = np.array(runs, dtype=np.int64).reshape(-1, ranks)
        node = topology.node_of[held[:, 0]]
        return cls(held, node, topology.group_of[node])

    def placed(self, cost: PlacedCost, chosen: Ints) -> tuple[int, ...]:
        """The device of each rank, where the cell `replica * pp + stage` has the block `chosen` for it."""
        layout: Layout = cost.layout
        taken = np.zeros(layout.dp * layout.pp, dtype=np.int64)
        devices = []
        for cell in cost.rank_cells.tolist():
            devices.append(int(self.devices[chosen[cell], taken[cell]]))
            taken[cell] += 1
        return tuple(devices)

    def nodes(self, layout: Layout, chosen: Ints) -> Ints:
        """The node of each cell, shape (dp, pp)."""
        return np.asarray(self.node[chosen[: layout.dp * layout.pp]].reshape(layout.dp, layout.pp))

    def in_order(self, groups: Sequence[int]) -> Ints:
        """All blocks, group by group."""
        return np.concatenate([np.flatnonzero(self.group == group) for group in groups])
