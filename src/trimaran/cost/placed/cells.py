"""Where the cells of a layout stand: the nodes of their ranks, and what joins those that are spread over several."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimaran.cost.grid import Bools, Ints
from trimaran.cost.placed.hops import hops
from trimaran.cost.placed.topology import Topology
from trimaran.nouns.hardware.link import Link


@dataclass(frozen=True)
class Standing:
    """Of c cells of ranks: the node of each rank, shape (ranks, c), the groups of each, and what joins its nodes.

    A cell inside of a node, or on whole nodes of one group, has no link of its own (None): that of its group counts.
    """

    nodes: Ints
    groups: list[tuple[int, ...]]
    links: list[Link | None]

    @property
    def spread(self) -> bool:
        """Whether any cell is spread over nodes that it shares, or over groups."""
        return any(link is not None for link in self.links)


def lanes_of(nodes: Ints, streams: int) -> tuple[Ints, int]:
    """Nodes of the ranks that send for each cell, shape (lanes, dp, pp), and how many streams each of them has.

    Where cells stand on one node each, or on whole ones, shape (dp, pp), one stands for all ranks of its cell.
    """
    return (nodes[None], streams) if nodes.ndim == 2 else (nodes[:streams], 1)


def standing_cells(topology: Topology, devices: Ints, rank_cells: Ints) -> Standing:
    """How cells stand whose ranks, each in the cell that `rank_cells` has for it, stand on `devices`."""
    by_cell = np.argsort(rank_cells, kind="stable").reshape(int(rank_cells.max()) + 1, -1)
    nodes = topology.node_of[devices[by_cell]]
    groups = topology.group_of[nodes]
    inside = (nodes == nodes[:, :1]).all(axis=1)
    spans = 1 + (np.diff(np.sort(nodes, axis=1), axis=1) != 0).sum(axis=1)
    of_one = (groups == groups[:, :1]).all(axis=1)
    whole = of_one & (spans * topology.per_node[groups[:, 0]] == nodes.shape[1])
    links = _links(topology, nodes, ~(inside | whole))
    return Standing(nodes.T, [tuple(sorted(set(each))) for each in groups.tolist()], links)


def _links(topology: Topology, nodes: Ints, spread: Bools) -> list[Link | None]:
    """What joins the ranks of each cell that is spread, None for the others.

    They sum over a ring in their order, and all cells at once: its slowest way paces it, and a way of it has on average
    the delay that the whole has by ranks.
    """
    found: list[Link | None] = [None] * len(nodes)
    if spread.any():
        over = nodes[spread]
        way = hops(topology, over, np.roll(over, -1, axis=1), 1, np.zeros(over.shape, dtype=np.int64))
        rates, delays = way.gbps.min(axis=1).tolist(), way.delay_us.mean(axis=1).tolist()
        for cell, gbps, delay in zip(np.flatnonzero(spread).tolist(), rates, delays, strict=True):
            found[cell] = Link(bandwidth_gbps=gbps, latency_us=delay)
    return found
