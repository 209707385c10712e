"""Shaped networks: nodes as network namespaces of this machine, joined by a switch with delay and rate."""

from __future__ import annotations

from trimaran.bench.launcher import Launcher, launcher_named
from trimaran.bench.network.launcher import ShapedLauncher, network_note
from trimaran.cluster import Cluster
from trimaran.shaping import ShapedNetwork

__all__ = ["ShapedLauncher", "launcher_for", "network_note", "network_variant"]


def launcher_for(cluster: Cluster) -> Launcher:
    """The launcher that runs trials on `cluster`: the local one, on its shaped network where it has one."""
    return launcher_named("local") if cluster.shaped is None else ShapedLauncher(cluster.shaped)


def network_variant(network: ShapedNetwork | None) -> str:
    """What the variant column says of a shaped network, besides its delay and rate, which have columns."""
    if network is None:
        return ""
    return f"network={network.name}" + (f";network_scale={network.scale:g}" if network.scale != 1 else "")
