"""One rank of a probe of the links between nodes: `python -m trimaran.probe.links FILE`, on every node at once.

Ranks meet where whatever started them says; rank 0 leaves the file.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from trimaran.nouns.noun import TrimaranError
from trimaran.probe.links_result import LinksResult, PairOfNodes
from trimaran.probe.probe_settings import KIB, MIB
from trimaran.probe.timing import synchronize
from trimaran.protocol.environment import LOCAL_RANK, RANK, WORLD_SIZE
from trimaran.train.process.leave import leave
from trimaran.train.run.meeting import RENDEZVOUS_TIMEOUT, joined_store

# What is sent to learn a latency, and a bandwidth.
SMALL_BYTES, LARGE_BYTES = 4 * KIB, 16 * MIB
_SMALL_ROUNDS, _LARGE_ROUNDS = 40, 5


def measure_links(rank: int, world_size: int, local_rank: int, device: torch.device) -> LinksResult:
    """Send between the nodes, a pair of neighbours at a time; the result, which is rank 0's alone to use.

    A pair's bandwidth is what all ranks of the one node send to those of the other at the same time, its latency that
    of a small message between the first two. Ranks are numbered node by node, as many on each. Raises TrimaranError
    where they are not, or are all on one node.
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
    # of two nodes the ring has one link, which goes both ways
    neighbours = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else 1)]
    pairs = []
    for first, second in neighbours:
        latency_s = _seconds_one_way(rank, per_node, first, second, SMALL_BYTES, _SMALL_ROUNDS, 1, device)
        large_s = _seconds_one_way(rank, per_node, first, second, LARGE_BYTES, _LARGE_ROUNDS, per_node, device)
        pairs.append(
            PairOfNodes(
                first=first,
                second=second,
                latency_us=latency_s * 1e6,
                bandwidth_gbps=per_node * LARGE_BYTES * 8 / large_s / 1e9,
            )
        )
    return LinksResult(nodes=nodes, ranks_per_node=per_node, pairs=tuple(pairs))


def _seconds_one_way(
    rank: int, per_node: int, first: int, second: int, size: int, rounds: int, senders: int, device: torch.device
) -> float:
    """Half of a there-and-back of `size` bytes by each of the first `senders` ranks of a pair of nodes, at once.

    The median of all rounds but the first, which opens the connections; the slowest rank counts.
    """
    node, place = divmod(rank, per_node)
    takes_part = node in (first, second) and place < senders
    peer = (second if node == first else first) * per_node + place
    tensor = torch.zeros(size // 4, device=device)
    turns: tuple[Callable[..., object], ...] = (dist.send, dist.recv) if node == first else (dist.recv, dist.send)
    taken = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        for turn in turns if takes_part else ():
            turn(tensor, peer)
        synchronize(device)
        taken.append(time.perf_counter() - begin if takes_part else 0.0)
    seconds = torch.tensor(taken[1:], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    slowest: list[float] = seconds.tolist()
    return statistics.median(slowest) / 2


def main(arguments: list[str]) -> int:
    """Measure as one rank; the exit status. What is wrong with all ranks, rank 0 says."""
    rank, world_size, local_rank = (int(os.environ[name]) for name in (RANK, WORLD_SIZE, LOCAL_RANK))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=joined_store(rank, world_size), rank=rank, world_size=world_size, timeout=RENDEZVOUS_TIMEOUT,
    )  # fmt: skip
    try:
        result = measure_links(rank, world_size, local_rank, device)
    except TrimaranError as error:
        if rank == 0:
            print(f"trimaran: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(arguments[0]).write_text(result.model_dump_json())
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
