"""How ranks meet: the store through which they find each other, the job handed on there, the process group."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from trimaran.protocol.environment import MASTER_ADDR, MASTER_PORT, RENDEZVOUS_FD, TORCHRUN_RESTARTS, TORCHRUN_STORE
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob, read_job
from trimaran.train.comm.waiting import RENDEZVOUS_TIMEOUT
from trimaran.train.run.silence import tell_collectives


def connect(store: Store | None, rank: int, world_size: int, device: torch.device, flight: Path) -> None:
    """Join the other ranks; from then on this one can be asked which collective it waits in (in the file `flight`).

    The ranks meet in `store`, or at their launcher's meeting point where it is None.
    """
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store or _meeting_point(rank, world_size),
        rank=rank,
        world_size=world_size,
        timeout=RENDEZVOUS_TIMEOUT,
    )
    tell_collectives(flight, on_gpu=on_gpu)


def joined_store(rank: int, world_size: int) -> Store:
    """The store of ranks that torchrun or Slurm started: torchrun's own, or one at which rank 0 listens."""
    store = _meeting_point(rank, world_size)
    if store is None:
        address, port = os.environ[MASTER_ADDR], int(os.environ[MASTER_PORT])
        store = TCPStore(address, port, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
    return PrefixStore(f"trimaran/{os.environ.get(TORCHRUN_RESTARTS, '0')}", store)


def shared_job(paths: list[str], rank: int, store: Store) -> TrainJob:
    """The job that rank 0 was given, handed to all ranks. What the others complain of goes to the job's folder."""
    if rank == 0:
        job = read_job(TrainJob, Path(paths[0]))
        store.set("job", job.model_dump_json())
        return job
    job = TrainJob.model_validate_json(store.get("job"))
    Path(job.out_dir).mkdir(parents=True, exist_ok=True)
    for kind, stream in ((RunFile.STDOUT, sys.stdout), (RunFile.STDERR, sys.stderr)):
        with kind.of(job.out_dir, rank).open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    return job


def _meeting_point(rank: int, world_size: int) -> Store | None:
    """The store through which ranks find each other, at MASTER_ADDR and MASTER_PORT, where rank 0 listens.

    A launcher that hands rank 0 its bound socket (RENDEZVOUS_FD) cannot lose the port to another program meanwhile,
    and decides who may connect. Under torchrun the store is mostly torchrun's own (None).
    """
    if os.environ.get(TORCHRUN_STORE) == "True":
        return None
    held = os.environ.get(RENDEZVOUS_FD) if rank == 0 else None
    return TCPStore(
        os.environ[MASTER_ADDR],
        int(os.environ[MASTER_PORT]),
        world_size,
        is_master=rank == 0,
        timeout=RENDEZVOUS_TIMEOUT,
        master_listen_fd=None if held is None else int(held),
    )
