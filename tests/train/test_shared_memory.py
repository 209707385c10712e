"""Collectives through shared memory, between processes as they are used."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from tests.ports import free_port

if TYPE_CHECKING:
    from trimaran.train.comm.shared_memory import SharedMemory

RANKS = 3

# a few bytes, more than the direct path takes, more than one slot, and sizes that no rank count divides
SIZES = (1, 5, 8209, 262_144 * 2 + 7)
# elements that each rank sends each: nothing from some, and more than a slot from others
COUNTS = ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[0, 700_001, 0], [0, 0, 0], [13, 300_000, 2]], [[0] * 3] * 3)


def check_exchange(memory: SharedMemory, rank: int) -> None:
    """Rows of uneven counts arrive whole and in order."""
    import torch

    for dtype, counts in product((torch.float32, torch.bfloat16, torch.int64), COUNTS):
        sent = [torch.arange(sum(row)).add(1000 * r).to(dtype) for r, row in enumerate(counts)]
        received = torch.empty(sum(row[rank] for row in counts), dtype=dtype)
        for _ in range(3):
            memory.exchange(received, sent[rank], counts)
            assert torch.equal(received, torch.cat([s.split(row)[rank] for s, row in zip(sent, counts, strict=True)]))


def serve(rank: int, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from trimaran.train.comm.shared_memory import PeerDiedError, share_memory
    from trimaran.train.comm.waiting import WaitClock

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    memory = share_memory(rank, RANKS, None, WaitClock())
    assert memory is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for size in SIZES:
            generators = [torch.Generator().manual_seed(r) for r in range(RANKS)]
            parts = [torch.randn(size, generator=g).to(dtype) for g in generators]
            # 16 bit is added up in fp32
            wide = [p.float() if p.element_size() == 2 else p for p in parts]
            total = (wide[0] + wide[1] + wide[2]).to(dtype)
            for _ in range(3):  # the slots take turns
                own = parts[rank].clone()
                memory.all_reduce(own)
                assert torch.equal(own, total)
            served = parts[rank].clone()
            memory.reduce_to_first(served)
            assert torch.equal(served, parts[rank] if rank else total)
            memory.broadcast_from_first(served)
            assert torch.equal(served, total)
            if dtype != torch.float64:
                whole = torch.stack([p.roll(rank) for p in parts])
                wanted = sum(wide[rank].roll(r) for r in (rank, *(r for r in range(RANKS) if r != rank)))
                wanted = wanted.to(dtype)
                apart = torch.empty(size, dtype=dtype)
                memory.reduce_scatter(apart, whole)
                memory.reduce_scatter(whole[rank], whole)
                assert torch.equal(apart, wanted) and torch.equal(whole[rank], wanted)
                memory.all_gather_into(whole, parts[rank])
                assert torch.equal(whole, torch.stack(parts))
                memory.all_gather_into(whole, whole[rank])
                assert torch.equal(whole, torch.stack(parts))
                arrived = torch.empty_like(parts[rank])
                memory.shift(parts[rank], arrived)
                assert torch.equal(arrived, parts[rank - 1])
                sent = torch.stack([parts[rank].roll(to) for to in range(RANKS)])
                memory.all_to_all(whole, sent)
                assert torch.equal(whole, torch.stack([p.roll(rank) for p in parts]))
    check_exchange(memory, rank)
    gathered = memory.all_gather(torch.full((2, 3), float(rank)))
    assert [g.tolist() for g in gathered] == [[[float(r)] * 3] * 2 for r in range(RANKS)]
    pipe.send("sums agree")
    pipe.recv()
    try:
        memory.all_reduce(torch.ones(1))
    except PeerDiedError as error:
        pipe.send(str(error))
    pipe.recv()


def files_mapped(process: int) -> set[str]:
    """Files of shared memory that a process has mapped, by the names that they have or had."""
    maps = Path(f"/proc/{process}/maps").read_text()
    return set(re.findall(r"/dev/shm/trimaran-\w+", maps))


def test_collectives_are_exact_and_the_same_everywhere_and_a_dead_rank_is_noticed() -> None:
    port = free_port()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(rank, port, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        assert pipe.recv() == "sums agree"
    # of these ranks' own file, since trainings of other tests run beside: it is mapped, and has no name any more
    mapped = [files_mapped(process.pid or 0) for process in processes]
    assert mapped[0] and mapped.count(mapped[0]) == RANKS
    assert not any(Path(file).exists() for file in mapped[0])
    os.kill(processes[2].pid or 0, signal.SIGKILL)
    processes[2].join()
    for pipe in pipes[:2]:
        pipe.send("one sum more")
    for pipe in pipes[:2]:
        assert pipe.poll(20)
        assert pipe.recv() == f"process {processes[2].pid} of the same group has ended"
    for process in processes[:2]:
        process.kill()


def test_ranks_that_cannot_ask_whether_others_live_share_no_memory() -> None:
    """Containers may share the memory's file system and the network, and number their processes each by itself."""
    ask = "from trimaran.train.comm.shared_memory import _machine; print(_machine())"
    apart = ["unshare", "--pid", "--fork", "--kill-child"]
    here, also_here, there = (
        subprocess.run([*how, sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
        for how in ([], [], apart)
    )
    assert here == also_here != there
