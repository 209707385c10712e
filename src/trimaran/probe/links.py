"""One rank of a probe of the links between nodes: `python -m trimaran.probe.links FILE`, on every node at once.

Ranks meet where whatever started them says; rank 0 leaves the file.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from trimaran.nouns.noun import TrimaranError
from trimaran.probe.alike_nodes import Floats
from trimaran.probe.links_result import AtOnce, LinksResult, NodeFacts
from trimaran.probe.probe_settings import KIB, LIMIT_S, MIB, QUICK_LIMIT_S
from trimaran.probe.timing import synchronize, undisturbed
from trimaran.probe.tournament import Pair, rounds_of_pairs
from trimaran.protocol.environment import LOCAL_RANK, RANK, WORLD_SIZE
from trimaran.protocol.host import memory_gib, processor_name, usable_cores
from trimaran.train.comm.waiting import RENDEZVOUS_TIMEOUT
from trimaran.train.process.leave import leave
from trimaran.train.run.meeting import joined_store

# What is sent to learn a delay; what is sent first to learn about how fast a way is, and at most for its bandwidth.
SMALL_BYTES, FIRST_BYTES, LARGE_BYTES = 4 * KIB, 256 * KIB, 16 * MIB
# About how long one send may take, and all messages for a delay.
_SEND_S, _PINGS_S = 0.25, 0.3
_LEAST_PINGS, _MOST_PINGS, _SENDS = 3, 20, 3
# Pairs of two groups that send at once, at most: more tell nothing further of a line that they share.
_MOST_AT_ONCE = 16
# Side of the product, and seconds, that tell how fast a device is.
_SIDE, _PRODUCT_S = 384, 0.5


class LinkProbe:
    """One rank's part in measuring all ways between nodes; every rank calls the same methods in the same order."""

    def __init__(self, rank: int, per_node: int, nodes: int, device: torch.device, limit_s: float) -> None:
        self._node, self._place = divmod(rank, per_node)
        self._per_node, self._nodes, self._device = per_node, nodes, device
        self._limit_s = limit_s
        self._small = torch.zeros(SMALL_BYTES // 4, device=device)

    def measure(self) -> LinksResult:
        """The tournament of all pairs, then what nodes of a group, and pairs of two groups, get at once."""
        nodes = self._facts()
        latency, bandwidth, rounds = self._tournament()
        matrices = {
            "latency_us": tuple(map(tuple, latency.tolist())), "bandwidth_gbps": tuple(map(tuple, bandwidth.tolist())),
        }  # fmt: skip
        result = LinksResult(
            nodes=nodes, ranks_per_node=self._per_node, rounds=rounds, ring_gbps=(0.0,) * self._nodes, **matrices
        )
        groups = result.groups
        ring = self._rings(groups, latency, bandwidth)
        return result.model_copy(update={"ring_gbps": tuple(ring), "at_once": tuple(self._at_once(groups))})

    def _facts(self) -> tuple[NodeFacts, ...]:
        """What each node is, by its first rank."""
        on_gpu = self._device.type == "cuda"
        own = NodeFacts(
            host=socket.gethostname(),
            device=torch.cuda.get_device_name(self._device) if on_gpu else processor_name(),
            slots=torch.cuda.device_count() if on_gpu else usable_cores(),
            mem_gib=torch.cuda.get_device_properties(self._device).total_memory / 2**30 if on_gpu else memory_gib(),
            gflops=_gflops(self._device),
        )
        told: list[str] = [""] * (self._nodes * self._per_node)
        dist.all_gather_object(told, own.model_dump_json())
        return tuple(NodeFacts.model_validate_json(text) for text in told[:: self._per_node])

    def _tournament(self) -> tuple[Floats, Floats, int]:
        """Delays (microseconds) and bandwidths (gigabit/s), (n, n), and the number of rounds that time allowed.

        A round begins where the longest so far would still end in time. The first two are always played: together they
        join all nodes, so that there is a way to any that was not measured (`filled`); one leaves pairs apart.
        """
        latency, bandwidth = np.zeros((self._nodes, self._nodes)), np.zeros((self._nodes, self._nodes))
        begin = time.perf_counter()
        longest = before = 0.0
        rounds = 0
        for pairs in rounds_of_pairs(self._nodes):
            if rounds > 1 and before + longest > self._limit_s:
                break
            self._play(pairs, latency, bandwidth)
            now = self._agreed(time.perf_counter() - begin)
            longest, before = max(longest, now - before), now
            rounds += 1
        return self._summed(latency), self._summed(bandwidth), rounds

    def _play(self, pairs: Sequence[Pair], latency: Floats, bandwidth: Floats) -> None:
        """Measure pairs of nodes at once, each way after the other; what this rank saw is added to the matrices."""
        dist.barrier()
        own = next((pair for pair in pairs if self._node in pair), None)
        if own is None:
            return
        peer_node = own[1] if self._node == own[0] else own[0]
        peer = peer_node * self._per_node + self._place
        first = self._node == own[0]
        trip_s = self._round_trip(peer, first=first)
        for sends in (first, not first):
            rate = self._rate(peer, trip_s, sends=sends)
            if sends:
                bandwidth[self._node, peer_node] += rate
        if self._place == 0:
            latency[self._node, peer_node] = trip_s / 2 * 1e6

    def _round_trip(self, peer: int, *, first: bool) -> float:
        """Seconds of a small message there and back, undisturbed, as the one who sends first sees it."""
        once = min(self._there_and_back(self._small, peer, sends=first) for _ in range(2))
        agreed = torch.tensor([min(_MOST_PINGS, max(_LEAST_PINGS, _PINGS_S / max(once, 1e-6)))], device=self._device)
        self._pass_on(agreed, peer, sends=first)
        trips = [self._there_and_back(self._small, peer, sends=first) for _ in range(int(agreed.item()))]
        trip = torch.tensor([undisturbed(trips)], dtype=torch.float64, device=self._device)
        self._pass_on(trip, peer, sends=first)
        return float(trip.item())

    def _rate(self, peer: int, trip_s: float, *, sends: bool) -> float:
        """Gigabit/s to a peer, by the sender: what a large message takes longer than a small one; the best of several.

        The best, since other pairs of the round that are done leave a line that they share.
        """
        first = torch.zeros(FIRST_BYTES // 4, device=self._device)
        taken = min(self._there_and_back(first, peer, sends=sends) for _ in range(2)) - trip_s
        agreed = torch.tensor([_bytes_of(FIRST_BYTES / max(taken, 1e-6))], dtype=torch.int64, device=self._device)
        self._pass_on(agreed, peer, sends=sends)
        size = int(agreed.item())
        large = torch.zeros(size // 4, device=self._device)
        best = min(self._there_and_back(large, peer, sends=sends) for _ in range(_SENDS))
        return (size - SMALL_BYTES) * 8e-9 / max(best - trip_s, 1e-9)

    def _there_and_back(self, tensor: torch.Tensor, peer: int, *, sends: bool) -> float:
        """Seconds in which a tensor goes to the peer and a small message comes back, or the other way around."""
        begin = time.perf_counter()
        self._pass_on(tensor, peer, sends=sends)
        self._pass_on(self._small, peer, sends=not sends)
        synchronize(self._device)
        return time.perf_counter() - begin

    def _pass_on(self, tensor: torch.Tensor, peer: int, *, sends: bool) -> None:
        if sends:
            dist.send(tensor, peer)
        else:
            dist.recv(tensor, peer)

    def _rings(self, groups: Sequence[Sequence[int]], latency: Floats, bandwidth: Floats) -> list[float]:
        """Gigabit/s of each node to the next of its group while all groups' nodes send and receive; 0 in groups of two.

        A pair alone has said what a group of two has.
        """
        rates = np.zeros(self._nodes)
        ring = next(group for group in groups if self._node in group)
        turn = ring.index(self._node)
        onward, before = ring[(turn + 1) % len(ring)], ring[turn - 1]
        sizes = [
            _bytes_of(bandwidth[u, v] * 1e9 / 8 / self._per_node) if bandwidth[u, v] > 0 else FIRST_BYTES
            for u, v in ((self._node, onward), (before, self._node))
        ]
        out, into = (torch.zeros(size // 4, device=self._device) for size in sizes)
        best = float("inf")
        for _ in range(_SENDS):
            dist.barrier()
            if len(ring) < 3:
                continue
            begin = time.perf_counter()
            received = dist.irecv(into, before * self._per_node + self._place)
            dist.send(out, onward * self._per_node + self._place)
            if received is not None:
                received.wait()
            synchronize(self._device)
            best = min(best, time.perf_counter() - begin)
        if len(ring) > 2:
            taken = best - 2e-6 * max(latency[self._node, onward], latency[before, self._node])
            rates[self._node] = sizes[0] * 8e-9 / max(taken, 1e-9)
        return [float(rate) for rate in self._summed(rates)]

    def _at_once(self, groups: Sequence[Sequence[int]]) -> list[AtOnce]:
        """What pairs of nodes of two groups get alone and together, each way, as far as time allows."""
        found = []
        begin = time.perf_counter()
        for first, second in (pair for pairs in rounds_of_pairs(len(groups)) for pair in pairs):
            pairs = [(u, v) for u, v in zip(groups[first], groups[second], strict=False)][:_MOST_AT_ONCE]
            if len(pairs) < 2:
                continue
            if self._agreed(time.perf_counter() - begin) > self._limit_s:
                break
            alone, together = (np.zeros((self._nodes, self._nodes)) for _ in range(2))
            for asked, seen in ((pairs[:1], alone), (pairs, together)):
                self._play([(min(pair), max(pair)) for pair in asked], np.zeros_like(seen), seen)
            alone, together = self._summed(alone), self._summed(together)
            for source, target, ways in ((first, second, pairs), (second, first, [(v, u) for u, v in pairs])):
                each = float(np.mean([together[u, v] for u, v in ways]))
                found.append(
                    AtOnce(groups=(source, target), pairs=len(pairs), alone_gbps=alone[ways[0]], each_gbps=each)
                )
        return found

    def _agreed(self, seconds: float) -> float:
        """The longest time of any rank, so that all decide alike."""
        longest = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest.item())

    def _summed(self, own: Floats) -> Floats:
        total = torch.tensor(own, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return np.asarray(total.cpu().numpy())


def _bytes_of(bytes_per_s: float) -> int:
    """What takes about `_SEND_S` at a rate, within bounds."""
    return int(min(LARGE_BYTES, max(FIRST_BYTES // 4, bytes_per_s * _SEND_S))) // 4 * 4


def _gflops(device: torch.device) -> float:
    """How fast the device multiplies: on a CPU by one thread's own time, which other programs do not lengthen."""
    on_gpu = device.type == "cuda"
    side = 8 * _SIDE if on_gpu else _SIDE
    left = torch.ones(side, side, device=device)
    clock = time.perf_counter if on_gpu else time.thread_time
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (left @ left).sum().item()
        best, until = 0.0, time.perf_counter() + _PRODUCT_S
        while not best or time.perf_counter() < until:
            begin = clock()
            left @ left
            synchronize(device)
            best = max(best, 2.0 * side**3 / max(clock() - begin, 1e-9) / 1e9)
    finally:
        torch.set_num_threads(threads)
    return best


def measure_links(
    rank: int, world_size: int, local_rank: int, device: torch.device, limit_s: float = LIMIT_S
) -> LinksResult:
    """Measure all ways between the nodes; the result, which is rank 0's alone to use.

    A way's bandwidth is what all ranks of the one node send to those of the other at the same time, its delay half of
    what a small message takes there and back between the first two. The tournament takes about `limit_s` at most, and
    what is sent at once as long again. Ranks are numbered node by node, as many on each. Raises TrimaranError where
    they are not, or are all on one node.
    """
    most_local = torch.tensor([local_rank], device=device)
    dist.all_reduce(most_local, op=dist.ReduceOp.MAX)
    per_node = int(most_local.item()) + 1
    out_of_place = torch.tensor([float(rank % per_node != local_rank)], device=device)
    dist.all_reduce(out_of_place)
    if out_of_place.item() or world_size % per_node:
        raise TrimaranError(
            f"probe: {world_size} ranks are not {per_node} on each node, node by node: start as many on each, as "
            f"srun --ntasks-per-node={per_node} does"
        )
    nodes = world_size // per_node
    if nodes == 1:
        raise TrimaranError(
            f"probe: all {world_size} ranks are on one node: start it on two or more, as srun --nodes=2 does, or by "
            f"itself"
        )
    return LinkProbe(rank, per_node, nodes, device, limit_s).measure()


def main(arguments: list[str]) -> int:
    """Measure as one rank; the exit status. What is wrong with all ranks, rank 0 says."""
    parser = argparse.ArgumentParser(prog="python -m trimaran.probe.links")
    parser.add_argument("file", type=Path, help="what rank 0 leaves")
    parser.add_argument("--quick", action="store_true", help="fewer rounds of pairs, where there are many nodes")
    options = parser.parse_args(arguments)
    rank, world_size, local_rank = (int(os.environ[name]) for name in (RANK, WORLD_SIZE, LOCAL_RANK))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=joined_store(rank, world_size), rank=rank, world_size=world_size, timeout=RENDEZVOUS_TIMEOUT,
    )  # fmt: skip
    try:
        result = measure_links(rank, world_size, local_rank, device, QUICK_LIMIT_S if options.quick else LIMIT_S)
    except TrimaranError as error:
        if rank == 0:
            print(f"trimaran: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()
    if rank == 0:
        options.file.write_text(result.model_dump_json(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
