"""How much memory a rank may use."""

from __future__ import annotations

import numpy as np

from trimaran.cost.grid import Floats, Ints
from trimaran.nouns.cluster import Cluster


def memory_limit_gib(cluster: Cluster, devices: Ints, margin: float = 0.0) -> Floats:
    """GiB that a rank may use, `margin` left free: its device's, or its share of a node's memory where slots share it.

    By how many devices are used; shape of `devices`.
    """
    limit = np.full(np.shape(devices), cluster.device.mem_gib)
    if cluster.host_mem_gib and cluster.device.kind == "cpu":
        limit = np.minimum(limit, host_share_gib(cluster, devices))
    return np.asarray(limit * (1.0 - margin))


def host_share_gib(cluster: Cluster, devices: Ints) -> Floats:
    """GiB of its host's memory that is there for each of so many devices; shape of `devices`."""
    return np.asarray(
        cluster.host_mem_gib / np.minimum(devices, cluster.devices_per_host or cluster.devices_per_machine)
    )
