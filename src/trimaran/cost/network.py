"""Time of collectives and sends: start-up latency plus bytes over the bandwidth that a group really gets.

Ring all-reduce of B bytes over n ranks moves 2 (n-1)/n B through every rank's link; reduce-scatter
and all-gather move half of it (Thakur et al., 2005; NCCL's "bus bandwidth"). A ring of thousands also waits for its
first byte to pass through all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

from trimaran.cost.calibration import SLOW_LINK_GBPS, Calibration
from trimaran.cost.grid import Bools, Floats, Ints, LayoutGrid
from trimaran.cost.measured import CollectiveTable
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.link import Link

# Passes of all bytes over a ring: a reduce-scatter and an all-gather, or one of them.
ALL_REDUCE, ALL_GATHER = 2.0, 1.0
# Channels of a ring over NVLink or several network cards, each a block of threads (NVIDIA/nccl 2.23, graph/connect.cc).
COLLECTIVE_MULTIPROCESSORS = 16.0
# What gloo and MPI move out of one CPU process, which copies through memory, whatever the link could carry.
CPU_COPY_BYTES_PER_S = 1e9


@dataclass(frozen=True)
class Group:
    """Where the ranks of one group along an axis sit: arrays over layouts.

    `inside` ranks of the group share a node; `crosses` says whether it spans several; `rivals`
    groups of the same kind share each node's link, which is `link`, or the cluster's where none is stated.
    """

    ranks: Floats
    inside: Floats
    crosses: Bools
    rivals: Floats
    link: Link | None = None

    @property
    def nodes(self) -> Floats:
        """Nodes that the group spans."""
        return np.where(self.crosses, np.ceil(self.ranks / self.inside), 1.0)


def group(ranks: Ints, stride: Ints, devices: Ints, cluster: Cluster, block: Ints | None = None) -> Group:
    """The group of `ranks` ranks `stride` apart, on nodes filled in rank order.

    It lies with others like it in a `block` of ranks, one such block after the other; None: in `ranks` x `stride`.
    """
    per_node = np.minimum(devices, cluster.devices_per_node)
    inside = np.clip(per_node // np.maximum(stride, 1), 1, ranks).astype(np.float64)
    return _group(ranks, inside, per_node, devices, ranks * stride if block is None else block)


def group_along(grid: LayoutGrid, cluster: Cluster, *axes: str) -> Group:
    """The group of ranks that differ along the axes together (or parts of them), the innermost first."""
    per_node = np.minimum(grid.devices, cluster.devices_per_node)
    sizes = [(grid.size(axis), grid.stride(axis)) for axis in axes]
    inside = reduce(np.multiply, (np.clip(per_node // np.maximum(step, 1), 1, ranks) for ranks, step in sizes)) * 1.0
    block = reduce(np.maximum, (np.where(ranks > 1, ranks * step, 1) for ranks, step in sizes))
    return _group(grid.fold(*axes), inside, per_node, grid.devices, block)


def expert_group(grid: LayoutGrid, cluster: Cluster, *axes: str) -> Group:
    """The group of ranks that differ along an axis of the experts, or along several, the innermost first.

    Of several, each begins where the one before ends. They are of one stage: where the placement has stages inside of
    replicas, ranks of other stages lie between them.
    """
    per_node = np.minimum(grid.devices, cluster.devices_per_node)
    # more ranks of experts than a stage has are refused by a rule, and may be asked about all the same
    of_stage, ranks, apart = grid.stage_places(per_node), np.maximum(grid.fold(*axes), 1), grid.places_apart(axes[0])
    inside = np.clip(of_stage // np.maximum(apart, 1), 1, ranks).astype(np.float64)
    run, block = grid.stride("pp"), np.maximum(ranks * apart, 1)
    # a block within a run of a stage's ranks is one of neighbours; else ranks of all stages lie between its own
    block = np.where((grid.pp == 1) | (run % block == 0), block, np.lcm(run, block) * grid.pp)
    return _group(ranks, inside, per_node, grid.devices, block)


def _group(ranks: Ints, inside: Floats, per_node: Ints, devices: Ints, block: Ints) -> Group:
    """A group of which `inside` ranks share a node where blocks of such groups and nodes fill each other evenly.

    Where a block is part of a node and they do not, some block lies on two nodes, whose groups are cut in two at most.
    Of a block's groups those share a node's link that have ranks on both sides of its border, or of both its borders.
    """
    block = np.maximum(block, 1)
    crosses = (ranks > 1) & (devices > per_node) & (per_node % block != 0)
    cut = crosses & (block < per_node)
    inside = np.where(cut, np.minimum(inside, np.ceil(ranks / 2.0)), inside)
    rivals = np.maximum(per_node / inside, 1.0)
    shared = np.flatnonzero(crosses & (block % per_node != 0))
    if len(shared):
        ranks_of, block_of, node_of = (each[shared] for each in (ranks, block, per_node))
        # borders lie at multiples of this in their blocks, the one that most groups cross nearest to the middle
        apart = np.gcd(node_of, block_of)
        crossing = np.maximum(np.minimum(block_of // ranks_of, block_of // 2 // apart * apart), 1.0)
        crossing = np.where((cut & (devices > 2 * per_node))[shared], 2.0 * crossing, crossing)
        rivals[shared] = np.minimum(rivals[shared], crossing)
    return Group(ranks.astype(np.float64), inside, crosses, rivals)


def crowded(cluster: Cluster) -> float:
    """Share of a GPU's multiprocessors that a collective takes from the products beside it."""
    multiprocessors = cluster.device.multiprocessors
    return min(1.0, COLLECTIVE_MULTIPROCESSORS / multiprocessors) if multiprocessors else 0.0


class Network:
    """Times on one cluster, as calibrated."""

    def __init__(self, cluster: Cluster, calibration: Calibration) -> None:
        self.cluster, self.calibration = cluster, calibration
        self._all_reduce = CollectiveTable(cluster.collectives, "all_reduce")
        self._send = CollectiveTable(cluster.collectives, "send")
        self._copying = CPU_COPY_BYTES_PER_S if cluster.device.kind == "cpu" else np.inf

    def all_reduce(self, size: Floats, where: Group) -> Floats:
        """Seconds of one all-reduce of `size` bytes; 0 in a group of one."""
        return self._collective(ALL_REDUCE, size, where)

    def all_gather(self, size: Floats, where: Group) -> Floats:
        """Seconds to gather (or reduce-scatter) a tensor of `size` bytes in full: half an all-reduce."""
        return self._collective(ALL_GATHER, size, where)

    def all_to_all(self, inside: Floats, across: Floats, per_node: Ints, fast: float, slow: float) -> Floats:
        """Seconds in which every rank sends `inside` bytes to others of its node and `across` bytes to other nodes.

        Both links work at once, and all ranks of a node, `per_node`, share its link to the others. `fast` and `slow`
        are the shares of the two that an exchange reaches; 0: those of collectives.
        """
        calibration = self.calibration
        intra = self._inside(fast or calibration.intra_bandwidth)
        inter = self._across(slow or calibration.inter_bandwidth, per_node.astype(np.float64), intra)
        hop = np.where(across > 0, self.cluster.inter.latency_us, self.cluster.intra.latency_us) * 1e-6
        return np.asarray(calibration.collective_us * 1e-6 + hop + np.maximum(inside / intra, across / inter))

    def _collective(self, passes: float, size: Floats, where: Group) -> Floats:
        """Start-up, hops and bytes; inside a node from measured times where the cluster has them."""
        n, cluster, calibration = where.ranks, self.cluster, self.calibration
        intra = self._inside(calibration.intra_bandwidth)
        # The ring enters and leaves every node once; rivals on the same node share its link.
        inter = self._across(calibration.inter_bandwidth, where.rivals, intra, where.link)
        bandwidth = np.where(where.crosses, inter, intra)
        start = calibration.collective_us * 1e-6 + self._hops(passes, where)
        time: Floats = start + passes * (n - 1) / n * size / bandwidth
        if cluster.shaped is not None:
            time = np.where(where.crosses, self._gloo_ring(passes, size, where), time)
        if self._all_reduce:
            measured = self._measured(size, where) / calibration.intra_bandwidth
            known = calibration.collective_us * 1e-6 * (cluster.device.kind == "gpu") + 0.5 * passes * measured
            time = np.where(where.crosses, time, known)
        return np.where(n > 1, time, 0.0)

    def _measured(self, size: Floats, where: Group) -> Floats:
        """Seconds of an all-reduce as it was probed, with one group at work at a time.

        CPU ranks copy through memory: where a node has fewer cores than ranks, rivals, or what else their ranks do
        meanwhile, take turns with what is copied. While they wait to begin they take no core.
        """
        ranks, share = np.maximum(where.ranks, 2.0), self.cluster.core_share
        alone, begun = self._all_reduce.time(size, ranks), self._all_reduce.time(np.zeros(1), ranks)
        turns = np.maximum(1.0, where.inside * where.rivals * share) / np.maximum(1.0, where.inside * share)
        return np.asarray(alone + np.maximum(alone - begun, 0.0) * (turns - 1.0))

    def _hops(self, passes: float, where: Group) -> Floats:
        """Seconds in which the first byte passes through all ranks.

        A ring passes n - 1 links for every pass, each node's border among them; an all-reduce may take a tree, up and
        down, whose depth is a node's ranks and the logarithm of the nodes (NVIDIA/nccl 2.23, src/graph/tuning.cc,
        ncclTopoTuneModel). MPI on CPUs goes up and down a tree of ranks.
        """
        inside, across = self.cluster.intra.latency_us * 1e-6, self._between(where).latency_us * 1e-6
        n, nodes = where.ranks, where.nodes
        if self.cluster.device.kind != "gpu":
            levels = np.ceil(np.log2(np.maximum(n, 2.0)))
            return np.asarray(2.0 * levels * np.where(where.crosses, across, inside))
        borders = np.where(where.crosses, np.minimum(nodes, n - 1.0), 0.0)
        ring = passes * ((n - 1.0 - borders) * inside + borders * across)
        if passes != ALL_REDUCE:
            return np.asarray(ring)
        tree = passes * ((where.inside - 1.0) * inside + np.ceil(np.log2(nodes)) * across)
        return np.asarray(np.minimum(ring, tree))

    def _inside(self, efficiency: float) -> float:
        """Bytes/s of one rank inside a node."""
        return min(self.cluster.intra.bytes_per_s * efficiency, self._copying)

    def _between(self, where: Group) -> Link:
        """What joins the nodes of a group."""
        return self.cluster.inter if where.link is None else where.link

    def _across(self, efficiency: float, rivals: Floats, intra: float, link: Link | None = None) -> Floats:
        """Bytes/s of one rank between nodes: its share of the node's link, through the link inside if there is one."""
        link = link or self.cluster.inter
        share = np.minimum(link.bytes_per_s * efficiency / rivals, self._copying)
        return np.asarray(np.minimum(share, intra) if self.cluster.devices_per_node > 1 else share)

    def _gloo_ring(self, passes: float, size: Floats, where: Group) -> Floats:
        """A ring between nodes under gloo: every hop waits until its receiver has said that it is ready.

        So a hop costs two delays and its bytes.
        """
        n, inter = where.ranks, self._between(where)
        hops = passes * (n - 1)
        bandwidth = inter.bytes_per_s / where.rivals
        start = self.calibration.collective_us * 1e-6
        time: Floats = start + hops * 2.0 * inter.latency_us * 1e-6 + hops / n * size / bandwidth
        return time

    def _gloo_serve(self, size: Floats, where: Group, rounds: Floats | float) -> Floats:
        """Between nodes under gloo: a ring that reduces and a gather to the first rank, then the tree of a broadcast.

        Hops cost two delays, as in `_gloo_ring`: n of them in the reduce, one for each level of the tree.
        """
        n, inter = where.ranks, self._between(where)
        one_way, bandwidth = inter.latency_us * 1e-6, inter.bytes_per_s / where.rivals
        reduce = 2.0 * n * one_way + 2.0 * (n - 1) / n * size / bandwidth
        broadcast = rounds * (2.0 * one_way + size / bandwidth)
        return np.where(where.crosses, reduce + broadcast, (1.0 + rounds) * size / self._inside(1.0))

    def send(self, size: Floats, crosses: Bools, rivals: Floats, link: Link | None = None) -> tuple[Floats, Floats]:
        """One send to the next stage: (seconds that the link is held, seconds until it arrives).

        `rivals` ranks of a node send at once over `link`, or the cluster's where none is stated. On a long link the
        window of unacknowledged data makes a message hold it for `send_delays` delays more than its bytes need.
        """
        cluster, calibration, link = self.cluster, self.calibration, link or self.cluster.inter
        intra = self._inside(calibration.send_bandwidth)
        inter = self._across(calibration.send_bandwidth, rivals, intra, link)
        delay = np.where(crosses, link.latency_us, cluster.intra.latency_us) * 1e-6
        held = size / np.where(crosses, inter, intra) + calibration.send_delays * delay
        arrives = held + calibration.collective_us * 1e-6
        if self._send:
            measured = self._send.time(size, np.full(np.shape(size), 2.0))
            if cluster.shaped is None:
                # a probe saw one node
                return np.where(crosses, held, measured), np.where(crosses, arrives, measured)
            # The receiver asks for the next message when it has taken this one: a round trip, and then the bytes.
            one_way, wire = link.latency_us * 1e-6, size * rivals / link.bytes_per_s
            paced = np.where(crosses, np.maximum(wire, measured) + 2.0 * one_way, measured)
            return paced, np.where(crosses, measured + wire + one_way, measured)
        return held, arrives

    def serve(self, size: Floats, where: Group) -> Floats:
        """Seconds in which one rank of a group takes in the sum of `size` bytes and sends the result to all.

        NCCL pipelines a reduce and a broadcast along a chain, so each moves the bytes once over every link
        whatever the group's size (GPT-3 XL on AWS p3: 4 replicas cost 2.0 times the first stage's bytes at each of
        four rates). gloo broadcasts along a binomial tree.
        """
        cluster, calibration = self.cluster, self.calibration
        # Both are chains of sends; over a fast link collectives do not get more than other collectives do.
        link = self._between(where)
        fast = link.bandwidth_gbps > SLOW_LINK_GBPS
        collective = calibration.inter_bandwidth if fast else np.inf
        intra = self._inside(min(calibration.send_bandwidth, calibration.intra_bandwidth))
        inter = self._across(min(calibration.send_bandwidth, collective), where.rivals, intra, link)
        rounds = np.ceil(np.log2(np.maximum(where.ranks, 2.0))) if cluster.device.kind == "cpu" else 1.0
        if cluster.shaped is not None:
            time = self._gloo_serve(size, where, rounds)
            return np.where(where.ranks > 1, time, 0.0)
        delay = np.where(where.crosses, link.latency_us, cluster.intra.latency_us) * 1e-6
        time = (1.0 + rounds) * size / np.where(where.crosses, inter, intra) + 2.0 * (where.ranks - 1.0) * delay
        return np.where(where.ranks > 1, time, 0.0)
