"""Views: a cluster of groups taken for alike nodes, each way of which shows a plan other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trimaran.cost.placed.topology import Topology
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.hardware.node_group import shared_out


class View(NamedTuple):
    """A cluster as alike nodes, and whether layouts on all of its devices alone are asked of it."""

    cluster: Cluster
    of_all: bool = False


def views(cluster: Cluster) -> list[View]:
    """The cluster as alike nodes: at its best, with the most memory, at its worst, as sites, and each group alone."""
    topology = Topology.of(cluster)
    kinds = topology.kinds
    plain = cluster.model_copy(update={"groups": (), "links": ()})
    each = [kind.device.mem_gib for kind in kinds]
    of_hosts = [kind.host_mem_gib / kind.devices_per_node for kind in kinds]
    lean = _at_best(plain, topology, min(each), min(of_hosts))
    roomy = _at_best(plain, topology, max(each), max(of_hosts) if min(of_hosts) else 0.0)
    alone = [View(kind) for kind in kinds if kind is not cluster]
    every = (View(lean), View(roomy), View(plain), *_as_sites(topology, lean), *alone)
    return list({repr(view._replace(cluster=_nameless(view.cluster))): view for view in every}.values())


def _nameless(cluster: Cluster) -> Cluster:
    return cluster.model_copy(update={"name": ""})


def _at_best(plain: Cluster, topology: Topology, gib: float, host_gib: float) -> Cluster:
    """The fastest devices and the best links everywhere, so much memory a device, and so much of a host's."""
    kinds = topology.kinds
    best = max(kinds, key=lambda kind: max(kind.device.peak_tflops.values()))
    per_node = max(kind.devices_per_node for kind in kinds)
    link = Link(bandwidth_gbps=float(topology.gbps.max()), latency_us=float(topology.delay_us[topology.gbps > 0].min()))
    device = best.device.model_copy(update={"mem_gib": gib})
    nodes = {"devices_per_node": per_node, "nodes": plain.devices // per_node}
    links = {"intra": _best([kind.intra for kind in kinds]), "inter": link}
    return plain.model_copy(update={"device": device, "host_mem_gib": host_gib * per_node, **nodes, **links})


def _as_sites(topology: Topology, at_best: Cluster) -> list[View]:
    """The cluster with groups as its nodes, whose devices have inside what they have of nodes' links, or of their own.

    What crosses a border of nodes is then what crosses between groups, and which axis of a layout does so is the first
    question of a placement. All devices are asked for: what one site does alone other views have. The way from site to
    site is the middle one of all, and as many nodes as a site has send over their own at once.
    """
    kinds, nodes = topology.kinds, np.bincount(topology.group_of, minlength=len(topology.kinds))
    if len(kinds) == 1 or nodes.max() == 1:
        return []
    apart = ~np.eye(len(kinds), dtype=np.bool_)
    ways = np.where(topology.shared, 1, np.minimum.outer(nodes, nodes))
    between = Link(
        bandwidth_gbps=float(np.median((topology.gbps * ways)[apart])),
        latency_us=float(np.median(topology.delay_us[apart])),
    )
    held = int((nodes * topology.per_node).min())
    as_sites = {"devices_per_node": held, "nodes": at_best.devices // held, "inter": between}
    near = _best([shared_out(group.inter, group.devices_per_node, 1) for group in kinds])
    return [View(at_best.model_copy(update={**as_sites, "intra": link}), of_all=True) for link in (near, at_best.intra)]


def _best(links: Sequence[Link]) -> Link:
    return Link(
        bandwidth_gbps=max(link.bandwidth_gbps for link in links), latency_us=min(link.latency_us for link in links)
    )
