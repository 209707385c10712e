"""Shaped networks: nodes as network namespaces of this machine, joined by a switch with delay and rate."""

from __future__ import annotations

from collections.abc import Sequence

from trimaran.bench.launch.network.launcher import ShapedLauncher, network_note
from trimaran.bench.launch.network.switched import SwitchedNetwork
from trimaran.nouns.shaped_network import ShapedNetwork

__all__ = ["ShapedLauncher", "network_note", "network_variant", "require_shaping"]


def require_shaping(networks: Sequence[ShapedNetwork]) -> None:
    """Raise TrimaranError where a sweep names networks and this machine or user can make none."""
    if networks:
        SwitchedNetwork(networks[0], 1).close()


def network_variant(network: ShapedNetwork | None) -> str:
    """What the variant column says of a shaped network, besides its delay and rate, which have columns."""
    if network is None:
        return ""
    return f"network={network.name}" + (f";network_scale={network.scale:g}" if network.scale != 1 else "")
