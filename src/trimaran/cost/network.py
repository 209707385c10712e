"""Time of collectives and sends: start-up latency plus bytes over the bandwidth that a group really gets.

Ring all-reduce of B bytes over n ranks moves 2 (n-1)/n B through every rank's link; reduce-scatter
and all-gather move half of it (Thakur et al., 2005; NCCL's "bus bandwidth").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimaran.cluster import Cluster
from trimaran.cost.calibration import Calibration
from trimaran.cost.grid import Bools, Floats, Ints
from trimaran.cost.measured import CollectiveTable


@dataclass(frozen=True)
class Group:
    """Where the ranks of one group along an axis sit: arrays over layouts.

    `inside` ranks of the group share a node; `crosses` says whether it spans several; `rivals`
    groups of the same kind share each node's link.
    """

    ranks: Floats
    inside: Floats
    crosses: Bools
    rivals: Floats


def group(ranks: Ints, stride: Ints, devices: Ints, cluster: Cluster) -> Group:
    """The group of `ranks` ranks `stride` apart, on nodes filled in rank order."""
    per_node = np.minimum(devices, cluster.devices_per_node)
    inside = np.clip(per_node // np.maximum(stride, 1), 1, ranks).astype(np.float64)
    crosses = (ranks - 1) * stride + 1 > per_node
    return Group(ranks.astype(np.float64), inside, crosses, np.maximum(per_node / inside, 1.0))


class Network:
    """Times on one cluster, as calibrated."""

    def __init__(self, cluster: Cluster, calibration: Calibration) -> None:
        self.cluster, self.calibration = cluster, calibration
        self._all_reduce = CollectiveTable(cluster.collectives, "all_reduce")
        self._send = CollectiveTable(cluster.collectives, "send")

    def all_reduce(self, size: Floats, where: Group, efficiency: float) -> Floats:
        """Seconds of one all-reduce of `size` bytes; 0 in a group of one."""
        if self._all_reduce:
            measured = self._all_reduce.time(size, np.maximum(where.ranks, 2.0))
            return np.where(where.ranks > 1, measured, 0.0)
        return self._ring(2.0, size, where, efficiency)

    def all_gather(self, size: Floats, where: Group, efficiency: float) -> Floats:
        """Seconds to gather (or reduce-scatter) a tensor of `size` bytes in full; half an all-reduce."""
        if self._all_reduce:
            return 0.5 * self.all_reduce(size, where, efficiency)
        return self._ring(1.0, size, where, efficiency)

    def _ring(self, passes: float, size: Floats, where: Group, efficiency: float) -> Floats:
        n, cluster = where.ranks, self.cluster
        intra = cluster.intra.bytes_per_s * efficiency
        # The ring enters and leaves every node once; rivals on the same node share its link.
        inter = np.minimum(cluster.inter.bytes_per_s * efficiency / where.rivals, intra)
        bandwidth = np.where(where.crosses, inter, intra)
        hops = np.where(where.crosses, cluster.inter.latency_us, cluster.intra.latency_us) * 1e-6
        start = self.calibration.collective_us * 1e-6 + hops * 2.0 * np.ceil(np.log2(np.maximum(n, 2.0)))
        return np.where(n > 1, start + passes * (n - 1) / n * size / bandwidth, 0.0)

    def send(self, size: Floats, crosses: Bools, rivals: Floats) -> tuple[Floats, Floats]:
        """One send to the next stage: (seconds that the link is held, seconds until it arrives).

        `rivals` ranks of a node send over its link at once. On a long link the window of unacknowledged
        data makes a message hold the link about one delay longer than its bytes need.
        """
        cluster, efficiency = self.cluster, self.calibration.pp_bandwidth
        if self._send:
            measured = self._send.time(size, np.full(np.shape(size), 2.0))
            return measured, measured
        inter = np.minimum(cluster.inter.bytes_per_s * efficiency / rivals, cluster.intra.bytes_per_s * efficiency)
        bandwidth = np.where(crosses, inter, cluster.intra.bytes_per_s * efficiency)
        delay = np.where(crosses, cluster.inter.latency_us, cluster.intra.latency_us) * 1e-6
        held = size / bandwidth + delay
        return held, held + self.calibration.collective_us * 1e-6
