"""Ranks that stay alive and train one layout after another: starting eight costs seconds, a layout little.

Pools of several test processes compute by turns: eight ranks keep a small machine busy, and pools that compute at once
only take from each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from tests.ports import free_port

from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob
from trimaran.protocol.phases import Heartbeat, RankPhase

RANKS = 8
# So many jobs use each other's groups, each of which has a thread of gloo's that wakes 100 times a second: those of
# hundreds of jobs took 0.4 of a core in two pools that had nothing to do.
JOBS_OF_GROUPS = 12


@dataclass(frozen=True)
class RankResult:
    """What one rank saw: losses of all steps, and the first step's gradient norms, squared, by weight."""

    losses: list[float]
    grad_norms: list[float]
    squared_grads: dict[str, float]
    told: list[dict[str, Any]] = field(default_factory=list)
    validation: float | None = None
    logits: Any = None


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


def _run_job(
    job: TrainJob, factory: Any, rank: int, *, logits: bool, poison: tuple[int, ...] = ()
) -> RankResult | None:
    import torch

    from trimaran.train.comm.mesh import build_mesh
    from trimaran.train.engine.trainer import Trainer
    from trimaran.train.run.first_weights import first_weights
    from trimaran.train.run.samples import open_data
    from trimaran.train.state.saver import saving_group

    mesh = build_mesh(job.layout, rank, range(job.layout.devices), factory)
    if job.checkpoint_dir is not None:
        saving_group(tuple(range(job.layout.devices)))
    if mesh is None:
        return None
    sampler, held_out = open_data(job)
    trainer = Trainer(job, mesh, sampler, torch.device("cpu"), first_weights(job, lambda: None))
    if logits:
        return RankResult([], [], {}, logits=_logits(trainer))
    if job.checkpoint_dir is not None:
        return _run_course(trainer, poison)
    shares = [trainer.forward_backward()]
    flat = trainer.flat
    squared = {
        name: sum(
            grads[span.slice_in(owned)].double().square().sum().item()
            for counted in flat.counted
            for owned, grads in zip(flat.owned, flat.grads, strict=True)
            if len(span := place.span.within(counted).within(owned))
        )
        for name, place in flat.places.items()
    }
    # the first step goes on from these gradients
    forward_backward = trainer.forward_backward
    trainer.forward_backward = lambda: shares.pop() if shares else forward_backward()
    steps = [trainer.step() for _ in range(job.steps)]
    return RankResult(
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        squared_grads=squared,
        validation=None if held_out is None else trainer.evaluate(held_out),
    )


def _logits(trainer: Any) -> Any:
    """This replica's part of the first global batch as (sequences, s, vocabulary) on the last stage's first rank."""
    import torch
    from torch import Tensor

    from trimaran.train.model.tensor_parallel import sum_backward

    stage, tp, loss, found = trainer.stage, trainer.mesh.tp, trainer.stage.loss, []
    sequence = trainer.mesh.sequence

    def loss_and_logits(x: Tensor, targets: Tensor, scale: float) -> Tensor:
        shown = loss(x, targets, scale)
        local = sum_backward(x, tp) @ stage.head._matrix.t()
        whole = torch.cat(tp.all_gather(local.contiguous()), dim=-1)[..., : stage.head.model.vocab]
        if sequence.group.size > 1:
            parts = sequence.group.all_gather(whole.contiguous())
            places = [sequence.positions(part.shape[1], part.device, rank) for rank, part in enumerate(parts)]
            whole = torch.cat(parts, dim=1)[:, torch.cat(places).argsort()]
        cap = stage.head.model.logit_softcap
        found.append(torch.tanh(whole / cap) * cap if cap else whole)
        return shown

    stage.loss = loss_and_logits
    tokens, targets, documents = trainer._batch(trainer._sampler, 0, trainer.global_batch)
    with torch.no_grad():
        trainer.engine.evaluate(tokens, targets, 1.0, documents)
    return torch.cat(found).numpy() if found and tp.index == sequence.group.index == 0 else None


def _run_course(trainer: Any, poison: tuple[int, ...]) -> RankResult:
    """Train with checkpoints; what is told of them comes back too. A batch with a `poison` sample has no loss."""
    import math

    from trimaran.nouns.noun import TrimaranError
    from trimaran.train.run.course import Course

    told: list[dict[str, Any]] = []
    steps = []
    healthy = trainer.forward_backward

    def forward_backward() -> Any:
        first = trainer.consumed_samples
        share = healthy()
        bad = any(first <= sample < first + trainer.global_batch for sample in poison)
        return share * math.nan if bad and trainer.mesh.is_last_stage else share

    trainer.forward_backward = forward_backward
    try:
        heartbeat = Heartbeat(RunFile.HEARTBEAT.of(trainer.job.out_dir, trainer.mesh.world.index))
        heartbeat.enter(RankPhase.STEP)
        course = Course(trainer, None, lambda kind, /, **fields: told.append({"kind": kind, **fields}), heartbeat)
        while trainer.step_number < trainer.job.steps:
            course.before()
            steps.append(trainer.step())
            course.after(steps[-1])
        course.finish()
    except TrimaranError as error:
        told.append({"kind": "refused", "text": str(error)})
    return RankResult(
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        squared_grads={},
        told=told,
    )


def _serve(rank: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        TRIMARAN_NODE=f"n{rank % 2}",  # of two nodes, which hold snapshots for each other where a test asks for them
    )
    import torch
    import torch.distributed as dist

    from trimaran.train.comm.group import GroupFactory
    from trimaran.train.state.saver import saving_group

    torch.set_num_threads(1)
    os.nice(5)  # no test of theirs has a time limit that others' browsers and trials have
    dist.init_process_group("gloo")
    gc.freeze()  # what is imported
    # groups that share no memory are what ranks of several machines have
    devices = {"one": torch.device("cpu"), "several": torch.device("cuda")}
    factories = {machines: GroupFactory(device) for machines, device in devices.items()}
    jobs = 0
    while True:
        job, machines, logits, poison = pipe.recv()
        jobs += 1
        if jobs % JOBS_OF_GROUPS == 0:
            saving_group.cache_clear()
            factories = {machines: GroupFactory(device) for machines, device in devices.items()}
            _end_groups()
        pipe.send(_run_job(job, factories[machines], rank, logits=logits, poison=poison))


def _end_groups() -> None:
    """End the groups of earlier jobs, which all ranks are done with."""
    import torch.distributed as dist

    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """While no other pool of this user computes."""
    with (Path(tempfile.gettempdir()) / f"trimaran-pool-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Pool:
    """Eight ranks; a layout of fewer takes the first ones."""

    def __init__(self) -> None:
        port = free_port()
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

    def logits(self, job: TrainJob) -> Any:
        """Logits (sequences, s, vocabulary) of the first global batch, as the job's ranks compute them together."""
        ranks = self._ask(job, "one", logits=True)
        return [sequence for rank in ranks if rank.logits is not None for sequence in rank.logits]

    def _ask(self, job: TrainJob, machines: str, *, logits: bool, poison: tuple[int, ...] = ()) -> list[RankResult]:
        with _turn():
            for pipe in self._pipes:
                pipe.send((job, machines, logits, poison))
            answers = [pipe.recv() for pipe in self._pipes]
        ranks = [answer for answer in answers if answer is not None]
        assert len(ranks) == job.layout.devices
        return ranks

    def run(self, job: TrainJob, machines: Literal["one", "several"] = "one", poison: tuple[int, ...] = ()) -> Run:
        """Train the job on its ranks, which speak to each other as on one machine or as on several."""
        ranks = self._ask(job, machines, logits=False, poison=poison)
        for other in ranks[1:]:
            # text, since no NaN equals another
            assert repr((other.losses, other.validation)) == repr((ranks[0].losses, ranks[0].validation))
        squared: dict[str, float] = {}
        for r in ranks:
            for name, value in r.squared_grads.items():
                squared[name] = squared.get(name, 0.0) + value
        grad_norm_of = {name: value**0.5 for name, value in squared.items()}
        return Run(ranks[0].losses, ranks[0].grad_norms, grad_norm_of, ranks[0].told, ranks[0].validation)

    def close(self) -> None:
        """End all ranks; they hold nothing that outlives them, and an orderly end takes seconds."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
