"""Room: which nodes have memory enough for which stage of a layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.estimate import memory_per_stage
from trimaran.cost.grid import Floats, Ints, LayoutGrid
from trimaran.cost.placed.placed_estimate import group_limits_gib
from trimaran.cost.placed.topology import Topology
from trimaran.layout.layout import Layout
from trimaran.planner.placement.blocks import Blocks


@dataclass(frozen=True)
class Room:
    """GiB that a rank of each stage needs, shape (pp,), and may use on the nodes of each group, shape (g,)."""

    needs: Floats
    limits: Floats
    group_of: Ints

    @classmethod
    def of(cls, case: Case, layout: Layout, topology: Topology, margin: float) -> Room:
        """The room of a layout, such a share of each device's memory left free."""
        grid = LayoutGrid.from_layouts([layout], case.workload, case.stack)
        needs = np.array([stage.total for stage in memory_per_stage(case, grid)[0]])
        return cls(needs, group_limits_gib(topology, layout.devices, margin), topology.group_of)

    @cached_property
    def is_everywhere(self) -> bool:
        """Whether every stage fits on every node, so that no placement is better than another."""
        return bool(self.needs.max() <= self.limits.min())

    def excess(self, nodes: Ints) -> float:
        """By which share of its limit the fullest cell is above it, cells on such nodes (dp, pp); 0: all fit."""
        return max(0.0, float((self.needs / self.limits[self.group_of[nodes]].min(axis=0)).max()) - 1.0)

    def order(self, blocks: Blocks, replicas: int) -> Ints:
        """An order of blocks, the cells' first, in which every cell fits, if there is one: most memory to most need.

        Cells and blocks that are alike in what they need or have stay in their order.
        """
        need, has = np.tile(self.needs, replicas), self.limits[blocks.group]
        # what only some groups have room for, by which of them do
        enough = np.array([np.count_nonzero(self.limits < each) for each in need])
        cells, free = np.argsort(-enough, kind="stable"), np.argsort(-has, kind="stable")
        order = np.empty(len(blocks), dtype=np.int64)
        order[cells] = free[: len(cells)]
        order[len(cells) :] = free[len(cells) :]
        return order
