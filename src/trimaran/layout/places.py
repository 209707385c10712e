"""Places: on which node of a cluster, and on which device there, each rank of a layout stands."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.node_group import NodeGroup


@dataclass(frozen=True)
class Place:
    """A device by its number in the cluster, its node's number there and its own on that node, all from 0.

    `group` is the number of the node's group in `Cluster.groups`; 0 where all nodes are alike.
    """

    device: int
    node: int
    slot: int
    group: int = 0


def places(layout: Layout, cluster: Cluster) -> tuple[Place, ...]:
    """Where each rank stands: on the device that the layout names, or on the devices in their order.

    Devices are numbered group by group, node by node, as `Layout.placed` counts them.
    """
    return tuple(_place(device, cluster) for device in layout.placed or range(layout.devices))


def nodes_of(layout: Layout, cluster: Cluster) -> int:
    """How many nodes a layout's ranks stand on."""
    if layout.placed:
        return len({place.node for place in places(layout, cluster)})
    return -(-layout.devices // cluster.devices_per_node)


def peak_tflops(layout: Layout, cluster: Cluster) -> float | None:
    """Peak of a device in the layout's precision: see `mean_of_devices`."""
    return mean_of_devices(layout, cluster, lambda nodes: nodes.device.peak(layout.precision))


def mean_of_devices(
    layout: Layout, cluster: Cluster, figure: Callable[[Cluster | NodeGroup], float | None]
) -> float | None:
    """A figure of the devices that a layout's ranks stand on: the mean where they differ, None where one has none.

    Ranks that nobody has placed stand on the cluster's usual devices.
    """
    if not (cluster.groups and layout.placed) or max(layout.placed) >= cluster.devices:
        return figure(cluster)
    ranks = Counter(place.group for place in places(layout, cluster))
    figures = {group: figure(cluster.groups[group]) for group in ranks}
    known = {group: value for group, value in figures.items() if value is not None}
    if len(known) < len(ranks):
        return None
    return sum(known[group] * count for group, count in ranks.items()) / layout.devices


def _place(device: int, cluster: Cluster) -> Place:
    if not cluster.groups:
        node, slot = divmod(device, cluster.devices_per_node)
        return Place(device, node, slot)
    first_devices = [0, *accumulate(group.devices for group in cluster.groups)]
    group = bisect_right(first_devices, device) - 1
    node, slot = divmod(device - first_devices[group], cluster.groups[group].devices_per_node)
    return Place(device, node + sum(other.nodes for other in cluster.groups[:group]), slot, group)
