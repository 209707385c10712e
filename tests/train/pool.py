"""Ranks that stay alive and train one layout after another: starting eight costs seconds, a layout little."""

from __future__ import annotations

import multiprocessing
import os
import socket
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

from trimaran.protocol.job import TrainJob
from trimaran.train.model.weight import drawn

RANKS = 8


@dataclass(frozen=True)
class RankResult:
    """What one rank saw: losses of all steps, and the first step's gradient norms, squared, by weight."""

    dp: int
    tp: int
    losses: list[float]
    grad_norms: list[float]
    squared_grads: dict[str, float]
    sharded: dict[str, bool]
    told: list[dict[str, Any]] = field(default_factory=list)
    validation: float | None = None


@dataclass(frozen=True)
class Run:
    """What one layout showed, put together from its ranks."""

    losses: list[float]
    grad_norms: list[float]
    grad_norm_of: dict[str, float]
    told: list[dict[str, Any]] = field(default_factory=list)
    validation: float | None = None

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Notices of one kind."""
        return [notice for notice in self.told if notice["kind"] == kind]


def _run_job(job: TrainJob, factory: Any, rank: int) -> RankResult | None:
    import torch

    from trimaran.train.comm.mesh import build_mesh
    from trimaran.train.engine.trainer import Trainer
    from trimaran.train.run.samples import open_data
    from trimaran.train.state.saver import saving_group

    mesh = build_mesh(job.layout, rank, range(job.layout.devices), factory)
    if job.checkpoint_dir is not None:
        saving_group(tuple(range(job.layout.devices)))
    if mesh is None:
        return None
    sampler, held_out = open_data(job)
    trainer = Trainer(job, mesh, sampler, torch.device("cpu"), drawn(job.train.seed))
    if job.checkpoint_dir is not None:
        return _run_course(trainer)
    trainer.forward_backward()
    flat = trainer.flat
    squared = {
        name: trainer.data_parallel.counting_share
        * sum(
            grads[place.span.within(span).slice_in(span)].double().square().sum().item()
            for span, grads in zip(flat.owned, flat.grads, strict=True)
            if len(place.span.within(span))
        )
        for name, place in flat.places.items()
    }
    sharded = {n: p.spec.shard_dim is not None for n, p in flat.places.items()}
    flat.clear_grads()
    steps = [trainer.step() for _ in range(job.steps)]
    return RankResult(
        dp=mesh.dp.index,
        tp=mesh.tp.index,
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        squared_grads=squared,
        sharded=sharded,
        validation=None if held_out is None else trainer.evaluate(held_out),
    )


def _run_course(trainer: Any) -> RankResult:
    """Train with checkpoints; what is told of them comes back too."""
    from trimaran.nouns.noun import TrimaranError
    from trimaran.train.run.course import Course

    told: list[dict[str, Any]] = []
    steps = []
    try:
        course = Course(trainer, None, lambda kind, /, **fields: told.append({"kind": kind, **fields}), lambda: None)
        while trainer.step_number < trainer.job.steps:
            course.before()
            steps.append(trainer.step())
            course.after(steps[-1])
        course.finish()
    except TrimaranError as error:
        told.append({"kind": "refused", "text": str(error)})
    return RankResult(
        dp=trainer.mesh.dp.index,
        tp=trainer.mesh.tp.index,
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        squared_grads={},
        sharded={},
        told=told,
    )


def _serve(rank: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch
    import torch.distributed as dist

    from trimaran.train.comm.group import GroupFactory

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # groups that share no memory are what ranks of several machines have
    factories = {"one": GroupFactory(torch.device("cpu")), "several": GroupFactory(torch.device("cuda"))}
    while True:
        job, machines = pipe.recv()
        pipe.send(_run_job(job, factories[machines], rank))


class Pool:
    """Eight ranks; a layout of fewer takes the first ones."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # forked from a process that has imported what all of them need, which takes seconds
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["trimaran.train.state.saver", "trimaran.train.run.loop"])
        self._pipes = []
        self._processes = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: TrainJob, machines: Literal["one", "several"] = "one") -> Run:
        """Train the job on its ranks, which speak to each other as on one machine or as on several."""
        for pipe in self._pipes:
            pipe.send((job, machines))
        answers = [pipe.recv() for pipe in self._pipes]
        ranks = [answer for answer in answers if answer is not None]
        assert len(ranks) == job.layout.devices
        for other in ranks[1:]:
            assert (other.losses, other.validation) == (ranks[0].losses, ranks[0].validation)
        squared: dict[str, float] = {}
        for r in ranks:
            for name, value in r.squared_grads.items():
                if r.sharded[name] or r.tp == 0:
                    squared[name] = squared.get(name, 0.0) + value
        grad_norm_of = {name: value**0.5 for name, value in squared.items()}
        return Run(ranks[0].losses, ranks[0].grad_norms, grad_norm_of, ranks[0].told, ranks[0].validation)

    def close(self) -> None:
        """End all ranks; they hold nothing that outlives them, and an orderly end takes seconds."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
