"""Rings: over which links ranks that hold the same weights agree, and a stage's iteration as such a ring sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from trimaran.cost.effects.effect import IterationCost
from trimaran.cost.grid import Floats, Ints
from trimaran.cost.network import Group
from trimaran.cost.placed.hops import hops
from trimaran.cost.placed.topology import Topology
from trimaran.cost.stage_work import StageWork
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.hardware.node_group import slowest_of


class Ring(NamedTuple):
    """A ring of cells: rate of its slowest link (gigabit/s; 0: it stays inside a node), and `inside` cells a node.

    Its delay in microseconds is the whole of one round, by the nodes that it spans.
    """

    gbps: float
    delay_us: float
    inside: float

    @property
    def link(self) -> Link | None:
        """What joins its nodes; None inside of one."""
        return Link(bandwidth_gbps=self.gbps, latency_us=self.delay_us) if self.gbps else None

    def group(self, ranks: Floats, per_cell: Ints | int) -> Group:
        """Its ranks, `per_cell` of each cell."""
        inside = np.minimum(self.inside * per_cell, ranks)
        return Group(ranks, inside, (ranks > 1) & (self.gbps > 0), np.ones(1), self.link)


class Rings(NamedTuple):
    """How the replicas of a stage agree: those that share out its states, and those that hold copies of the same.

    Where a layout has but one of the two, both are its ring. Over `ends` the first and the last stage of a replica sum
    the gradient of an embedding that both hold; None: there is none, or the stage is neither.
    """

    sharers: Ring
    copies: Ring
    ends: Ring | None = None

    @property
    def slowest(self) -> Link | None:
        """A link that is nowhere better than those between replicas; None inside of nodes."""
        links = [ring.link for ring in (self.sharers, self.copies) if ring.link is not None]
        return slowest_of(links) if links else None


def rings_along(topology: Topology, nodes: Ints, axis: int, streams: int) -> list[list[Ring]]:
    """The unlike rings along an axis (-2, -3) of cells on `nodes`, shape (..., copies, sharers, pp), stage by stage.

    From each cell `streams` ranks send at once, and all rings go round at once.
    """
    way = hops(topology, nodes, np.roll(nodes, -1, axis=axis), streams, np.zeros(nodes.shape, dtype=np.int64))
    rates = np.where(way.crosses.any(axis=axis), way.gbps.min(axis=axis), 0.0)
    in_order = np.moveaxis(np.sort(nodes, axis=axis), axis, 0)
    spans = 1 + (in_order[1:] != in_order[:-1]).sum(axis=0)
    # the whole delay of a ring, which may pass a node more than once, by nodes
    delays = way.delay_us.sum(axis=axis) / spans
    figures = (each.reshape(-1, nodes.shape[-1]).T.tolist() for each in (rates, delays, nodes.shape[axis] / spans))
    stages = zip(*figures, strict=True)
    return [list(dict.fromkeys(Ring(*each) for each in zip(*stage, strict=True))) for stage in stages]


@dataclass
class StageIteration(IterationCost):
    """An iteration as the replicas of one stage see it: their rings, and the parameters of that stage."""

    rings: Rings = field(default_factory=lambda: Rings(*(Ring(0.0, 0.0, 1.0),) * 2))
    of_stage: Floats = field(default_factory=lambda: np.zeros(1))
    experts_of_stage: Floats | None = None
    known: StageWork | None = None

    @cached_property
    def work(self) -> StageWork:
        """What the stages do in one micro-batch, where it is known already."""
        return self.known if self.known is not None else super().work

    @cached_property
    def parameters(self) -> Floats:
        """Parameters of a rank of this stage."""
        return self.of_stage

    @cached_property
    def expert_parameters(self) -> Floats | None:
        """Those of them that are routed experts'."""
        return self.experts_of_stage

    def group_along(self, *axes: str) -> Group:
        """The group of ranks that differ along the axes together, over the ring on which they agree."""
        ranks = self.grid.fold(*axes) * 1.0
        if axes == ("replicate",):
            return self.rings.copies.group(ranks, 1)
        return self.rings.sharers.group(ranks, self.grid.cp)

    @property
    def end_stages(self) -> Group:
        """The two ranks that hold a tied embedding's part, or one alone where this stage is in between."""
        ends = self.rings.ends
        return Ring(0.0, 0.0, 1.0).group(np.ones(1), 1) if ends is None else ends.group(np.full(1, 2.0), 1)
