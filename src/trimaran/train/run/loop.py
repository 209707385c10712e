"""The loop of a training: a rank connects, builds its part of the model, makes all steps, writes down its result."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.exits import STOPPED
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob
from trimaran.protocol.json_file import write_json
from trimaran.protocol.notices import Notices
from trimaran.protocol.phases import Heartbeat, RankPhase
from trimaran.train.comm.group import GroupFactory
from trimaran.train.comm.mesh import build_mesh
from trimaran.train.engine.trainer import StepResult, Trainer
from trimaran.train.run.course import Course, StopSignals
from trimaran.train.run.device import choose_device
from trimaran.train.run.first_weights import first_weights
from trimaran.train.run.log import History, Log, iteration_of
from trimaran.train.run.meeting import connect
from trimaran.train.run.memory import memory_parts, memory_record, resident_gib
from trimaran.train.run.outcome import write_result
from trimaran.train.run.samples import validation_is_due
from trimaran.train.text.sampler import Sampler


def run_steps(
    job: TrainJob,
    rank: int,
    world_size: int,
    store: Store | None,
    samples: Sampler,
    held_out: Sampler | None,
    heartbeat: Heartbeat,
) -> int:
    """Make the steps of `job` as rank `rank`; rank 0 writes the log and the result. Returns the exit status.

    The ranks meet in `store`, or at their launcher's meeting point where it is None.
    """
    alive = heartbeat.beat
    stop = StopSignals() if job.saves else None
    device = choose_device(job)
    with heartbeat.during(RankPhase.CONNECT):
        if world_size > 1:
            connect(store, rank, world_size, device, RunFile.FLIGHT.of(job.out_dir, rank))
        mesh = build_mesh(job.layout, rank, range(world_size), GroupFactory(device))
    assert mesh is not None, "every rank of the world is in the layout"
    baseline_gib = resident_gib()
    with heartbeat.during(RankPhase.BUILD):
        trainer = Trainer(job, mesh, samples, device, first_weights(job, alive), on_action=lambda action: alive())
    with heartbeat.during(RankPhase.RESUME):
        course = Course(trainer, stop, Notices(RunFile.NOTICES.of(job.out_dir) if rank == 0 else None).tell, alive)
    log = Log(job, trainer.step_number) if rank == 0 else None
    history = History() if log is None else History.of(log.earlier)

    heartbeat.enter(RankPhase.STEP)
    while trainer.step_number < job.steps:
        course.before()
        result, seconds = _timed_step(trainer, record=job.record_timeline and trainer.step_number == job.steps - 1)
        history.add(result, seconds)
        alive()
        if held_out is not None and validation_is_due(job, trainer.step_number):
            history.add_validation(trainer.step_number, trainer.evaluate(held_out))
        if log is not None:
            peak_gib = memory_record(device, baseline_gib)["peak"]
            log.write(iteration_of(trainer, history, peak_gib))
        if course.after(result):
            return STOPPED
    course.finish()

    if log is not None and not history.sec_per_it:
        raise TrimaranError(
            f"all {job.steps} steps were made before, and their log is lost: raise train.steps to go on"
        )
    memory = memory_parts(trainer.flat, trainer.optimizer.state, memory_record(device, baseline_gib))
    write_result(trainer, history, heartbeat.seconds, memory)
    if world_size > 1:
        dist.destroy_process_group()
    return 0


def _timed_step(trainer: Trainer, *, record: bool) -> tuple[StepResult, float]:
    """One iteration and its seconds. `record` leaves the timeline of the first replica's pipeline in a file a stage."""
    mesh = trainer.mesh
    if record:
        trainer.recorder.start(mesh.world)
    begin = time.perf_counter()
    result = trainer.step()
    trainer.recorder.synchronize()
    seconds = time.perf_counter() - begin
    if record and mesh.dp.index == mesh.tp.index == 0:
        timeline = trainer.recorder.stop().model_dump(mode="json")
        write_json(RunFile.TIMELINE.of(trainer.job.out_dir, mesh.pp.index), timeline)
    return result, seconds
