"""What a probe of the links between nodes reports, and what of it a cluster's file says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.hardware.measured import four_digits
from trimaran.nouns.hardware.node_group import GroupLink, NodeGroup
from trimaran.nouns.noun import Noun
from trimaran.probe.alike_nodes import SPEED_ALIKE, alike_groups, filled

# Two rates that differ by more are not one: each way of a link, and a link alone and with others.
ALIKE = 1.25


class NodeFacts(Noun):
    """One node: its host's name, its device, how many it has, its memory and how fast a device multiplies."""

    host: str
    device: str
    slots: int = Field(gt=0)
    mem_gib: float = Field(gt=0)
    gflops: float = Field(gt=0)


class AtOnce(Noun):
    """From one group to another: gigabit/s of one pair of nodes alone, and of `pairs` pairs at once, each."""

    groups: tuple[int, int]
    pairs: int = Field(gt=1)
    alone_gbps: float = Field(gt=0)
    each_gbps: float = Field(gt=0)

    @property
    def shared(self) -> bool:
        """Whether they share a line: all together are nearer to one alone than to as many lines of their own."""
        return self.pairs * self.each_gbps < self.alone_gbps * (1 + self.pairs) / 2


class LinksResult(Noun):
    """The matrix of all ways, from row to column, bandwidth 0 where time did not allow it; of all ranks of a node.

    `ring_gbps` is what each node sent to the next of its group while all did, 0 where it was not measured.
    """

    nodes: tuple[NodeFacts, ...] = Field(min_length=2)
    ranks_per_node: int = Field(gt=0)
    rounds: int = Field(gt=0)
    latency_us: tuple[tuple[float, ...], ...]
    bandwidth_gbps: tuple[tuple[float, ...], ...]
    ring_gbps: tuple[float, ...]
    at_once: tuple[AtOnce, ...] = ()

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each group of nodes that are alike."""
        return alike_groups(
            np.array(self.latency_us),
            np.array(self.bandwidth_gbps),
            [node.gflops for node in self.nodes],
            [f"{node.device}, {node.slots}" for node in self.nodes],
        )

    def joined(self, node: Cluster) -> Cluster:
        """The cluster of so many nodes as the one that was measured, which is the first: of groups where they differ.

        Devices of another group are the first node's at the speed that was measured of them, with their own memory.
        """
        groups = self.groups
        names = _names([[self.nodes[member].host for member in group] for group in groups])
        inside = [self._link(group, group) or self._nearest(group) for group in groups]
        inside = [self._at_once(link, group) for link, group in zip(inside, groups, strict=True)]
        measured = sum(rate > 0 for row in self.bandwidth_gbps for rate in row) // 2
        most = len(self.nodes) * (len(self.nodes) - 1) // 2
        slowest, u, v = min(
            (rate, u, v) for u, row in enumerate(self.bandwidth_gbps) for v, rate in enumerate(row) if rate
        )
        slow = f"from {self.nodes[u].host} ({u}) to {self.nodes[v].host} ({v}): {slowest:.4g} Gbit/s"
        counted = f"links of {measured} of {most} pairs of {len(self.nodes)} nodes, {self.ranks_per_node} ranks each"
        said = f"{node.source}; {counted}; the slowest, {slow}"
        if len(groups) == 1:
            return node.model_copy(update={"nodes": len(self.nodes), "inter": inside[0], "source": said})
        unlike = len({(self.nodes[group[0]].device, self.nodes[group[0]].slots) for group in groups}) > 1
        unlike = unlike or max(self._speeds(groups)) > SPEED_ALIKE * min(self._speeds(groups))
        members = "; ".join(
            f"{name}: {' '.join(self.nodes[member].host for member in group)}"
            for name, group in zip(names, groups, strict=True)
        )
        others: dict[str, Any] = {
            name: getattr(node, name)
            for name in Cluster.model_fields
            if name not in NodeGroup.model_fields and name not in ("groups", "links", "nodes")
        }
        if unlike:
            # rates by shape are of the first node's device, and would stand for all
            others |= {"matmul": (), "attention": (), "models": ()}
            said += "; devices differ, so peaks stand for rates by shape"
        return Cluster.of_groups(
            [
                self._group(node, name, group, link, unlike=unlike)
                for name, group, link in zip(names, groups, inside, strict=True)
            ],
            [
                link
                for first in range(len(groups))
                for second in range(first + 1, len(groups))
                for link in self._between(groups, names, first, second)
            ],
            **{**others, "name": node.name, "source": f"{said}; {members}"},
        )

    def _speeds(self, groups: Sequence[Sequence[int]]) -> list[float]:
        return [float(np.median([self.nodes[member].gflops for member in group])) for group in groups]

    def _group(self, node: Cluster, name: str, group: Sequence[int], inter: Link, *, unlike: bool) -> NodeGroup:
        own, other = self.nodes[0], self.nodes[group[0]]
        device = node.device
        if unlike:
            speed = self._speeds([group])[0] / own.gflops
            peaks = {rate: four_digits(peak * speed) for rate, peak in device.peak_tflops.items()}
            device = device.model_copy(
                update={"name": other.device, "peak_tflops": peaks, "mem_gib": four_digits(other.mem_gib)}
            )
        return NodeGroup(
            name=name,
            device=device,
            nodes=len(group),
            devices_per_node=max(1, node.devices_per_node * other.slots // own.slots),
            intra=node.intra,
            inter=inter,
            host_mem_gib=four_digits(other.mem_gib) if unlike and node.host_mem_gib else node.host_mem_gib,
            price_per_device_hour=node.price_per_device_hour,
            spot_price_per_device_hour=node.spot_price_per_device_hour,
        )

    def _link(self, sources: Sequence[int], targets: Sequence[int]) -> Link | None:
        """The median of the ways from nodes to others; None where none was measured."""
        ways = [(u, v) for u in sources for v in targets if u != v and self.bandwidth_gbps[u][v] > 0]
        if not ways:
            return None
        return Link(
            bandwidth_gbps=four_digits(float(np.median([self.bandwidth_gbps[u][v] for u, v in ways]))),
            latency_us=four_digits(float(np.median([self.latency_us[u][v] for u, v in ways]))),
        )

    def _nearest(self, group: Sequence[int]) -> Link:
        """The best way to any other node: of a node alone, whose `inter` joins it to nothing."""
        ways = [link for v in range(len(self.nodes)) if (link := self._link(group, [v]))]
        return max(ways, key=lambda link: link.bandwidth_gbps)

    def _at_once(self, link: Link, group: Sequence[int]) -> Link:
        """The link as it is while all nodes of the group send, where that is slower, as behind a thin switch."""
        rates = [self.ring_gbps[member] for member in group if self.ring_gbps[member] > 0]
        slower = float(np.median(rates)) if rates else link.bandwidth_gbps
        return (
            link
            if slower * ALIKE > link.bandwidth_gbps
            else link.model_copy(update={"bandwidth_gbps": four_digits(slower)})
        )

    def _between(
        self, groups: Sequence[Sequence[int]], names: Sequence[str], first: int, second: int
    ) -> list[GroupLink]:
        """The link of two groups, or one for each way where they differ."""
        ways = [self._way(groups, first, second), self._way(groups, second, first)]
        both = (names[first], names[second])
        rates = [link.bandwidth_gbps for link, _ in ways]
        latency = max(link.latency_us for link, _ in ways)
        if max(rates) <= ALIKE * min(rates) and ways[0][1] == ways[1][1]:
            return [GroupLink(between=both, bandwidth_gbps=min(rates), latency_us=latency, shared=ways[0][1])]
        return [
            GroupLink(between=between, one_way=True, shared=shared, **link.model_dump())
            for between, (link, shared) in zip((both, both[::-1]), ways, strict=True)
        ]

    def _way(self, groups: Sequence[Sequence[int]], source: int, target: int) -> tuple[Link, bool]:
        """The way from one group to another, and whether all its nodes share it."""
        link = self._link(groups[source], groups[target])
        if link is None:  # time allowed no pair of the two: as of nodes nearby
            latency, bandwidth = self._all_ways
            u, v = groups[source][0], groups[target][0]
            link = Link(
                bandwidth_gbps=four_digits(float(bandwidth[u, v])), latency_us=four_digits(float(latency[u, v]))
            )
        found = next((each for each in self.at_once if each.groups == (source, target)), None)
        if found is None:
            return link, False
        rate = found.pairs * found.each_gbps if found.shared else found.each_gbps
        return link.model_copy(update={"bandwidth_gbps": four_digits(rate)}), found.shared

    @property
    def _all_ways(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return filled(np.array(self.latency_us), np.array(self.bandwidth_gbps))


def _names(hosts: Sequence[Sequence[str]]) -> list[str]:
    """A name for each group: what its hosts' names begin with, where that tells them apart, else a number."""
    begun = [re.sub(r"[-_.\d]*$", "", _beginning([host.partition(".")[0] for host in each])) for each in hosts]
    apart = all(begun) and len(set(begun)) == len(begun)
    return begun if apart else [f"group{number}" for number in range(1, len(hosts) + 1)]


def _beginning(words: Sequence[str]) -> str:
    """What all words begin with."""
    first, last = min(words), max(words)
    return first[: next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]
