"""Topology: which node each device of a cluster is on, and what joins any two nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trimaran.cost.grid import Bools, Floats, Ints
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.node_group import NodeGroup, ways_between
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.shaped_network import ShapedNetwork


@dataclass(frozen=True)
class Topology:
    """Nodes of g groups; those of one are alike and joined alike.

    `kinds` are clusters of the nodes of one group alone, shape (g,); `names` those of the groups. `group_of` has the
    group of each node and `node_of` the node of each device. From a node of one group to one of another the way has
    `gbps` and a delay of `delay_us`, shape (g, g), between nodes of one group on the diagonal; all nodes of the two
    groups have it together where it is `shared`. A node sends and takes in `port_gbps` at most, shape (g,), and its
    devices compute `slowdown` times as long as its kind's figures say, shape (g,).
    """

    kinds: tuple[Cluster, ...]
    names: tuple[str, ...]
    group_of: Ints
    node_of: Ints
    gbps: Floats
    delay_us: Floats
    shared: Bools
    port_gbps: Floats
    slowdown: Floats

    @classmethod
    def of(cls, cluster: Cluster) -> Topology:
        """The topology of any cluster; nodes that are alike are one group."""
        if cluster.groups:
            return _of_groups(cluster)
        if cluster.shaped is not None and differs(cluster):
            return _of_namespaces(cluster, cluster.shaped)
        return cls._built([cluster], [cluster.name], np.zeros(cluster.nodes, dtype=np.int64))

    @classmethod
    def _built(cls, kinds: Sequence[Cluster], names: Sequence[str], group_of: Ints) -> Topology:
        """Groups that are joined by nothing yet: between them the rate is 0."""
        groups = len(kinds)
        devices = np.array([kind.devices_per_node for kind in kinds])[group_of]
        gbps = np.diag([kind.inter.bandwidth_gbps for kind in kinds])
        delay = np.diag([kind.inter.latency_us for kind in kinds])
        none, ports = np.zeros((groups, groups), dtype=np.bool_), np.diag(gbps).copy()
        node_of = np.repeat(np.arange(len(group_of)), devices)
        return cls(tuple(kinds), tuple(names), group_of, node_of, gbps, delay, none, ports, np.ones(groups))

    @cached_property
    def kind_of(self) -> Ints:
        """The first group whose nodes are as those of each group, shape (g,), however many there are."""
        alone = [kind.model_copy(update={"nodes": 1}) for kind in self.kinds]
        nodes = list(zip(alone, self.slowdown.tolist(), strict=True))
        return np.array([nodes.index(node) for node in nodes])

    @cached_property
    def per_node(self) -> Ints:
        """Devices of a node of each group, shape (g,)."""
        return np.array([kind.devices_per_node for kind in self.kinds])

    @property
    def devices(self) -> int:
        """All devices."""
        return len(self.node_of)


def _of_groups(cluster: Cluster) -> Topology:
    kinds = [_kind(cluster, group) for group in cluster.groups]
    group_of = np.repeat(np.arange(len(kinds)), [group.nodes for group in cluster.groups])
    alone = Topology._built(kinds, [group.name for group in cluster.groups], group_of)
    place = {group.name: index for index, group in enumerate(cluster.groups)}
    gbps, delay, shared = alone.gbps.copy(), alone.delay_us.copy(), alone.shared.copy()
    for (source, target), link in ways_between(cluster.groups, cluster.links).items():
        way = place[source], place[target]
        gbps[way], delay[way], shared[way] = link.bandwidth_gbps, link.latency_us, link.shared
    return replace(alone, gbps=gbps, delay_us=delay, shared=shared)


def _kind(cluster: Cluster, group: NodeGroup) -> Cluster:
    """The nodes of one group as a cluster of their own."""
    alike = NodeGroup.model_fields.keys() & Cluster.model_fields.keys() - {"name"}
    as_nodes = {name: getattr(group, name) for name in alike}
    return cluster.model_copy(update={**as_nodes, "groups": (), "links": ()})


def _of_namespaces(cluster: Cluster, shaped: ShapedNetwork) -> Topology:
    """Each namespace as a group of its own, since any two of them may have a way of their own."""
    count = cluster.nodes
    alone = Topology._built([cluster] * count, [f"node {node}" for node in range(count)], np.arange(count))
    way = [(source, target) for source in range(count) for target in range(count) if source != target]
    gbps, delay = alone.gbps.copy(), alone.delay_us.copy()
    for source, target in way:
        gbps[source, target] = shaped.rate_gbps(source, target)
        delay[source, target] = shaped.delay_ms(source, target) * 1e3
    slowdown = 1.0 / np.array([shaped.speed(node) for node in range(count)])
    return replace(alone, gbps=gbps, delay_us=delay, port_gbps=np.full(count, shaped.port_gbps), slowdown=slowdown)


def differs(cluster: Cluster) -> bool:
    """Whether it matters on which of its devices a rank stands, nodes apart: nodes differ, or links between them."""
    shaped = cluster.shaped
    return bool(cluster.groups) or (shaped is not None and bool(shaped.pairs or shaped.nodes))


def devices_of(topology: Topology, placed: Sequence[int], ranks: int) -> Ints:
    """The device of each rank: as placed, or else in their order. Raises TrimaranError where there are too few."""
    devices = np.asarray(placed or range(ranks), dtype=np.int64)
    if len(devices) != ranks or devices.max(initial=0) >= topology.devices:
        raise TrimaranError(
            f"placed names {len(devices)} devices up to {devices.max(initial=0)}, for {ranks} ranks on "
            f"{topology.devices} devices: name one for each rank"
        )
    return devices
