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
from trimaran.protocol.notices import Notice, Notices
from trimaran.protocol.phases import Heartbeat, RankPhase
from trimaran.train.comm.group import GroupFactory
from trimaran.train.comm.mesh import build_mesh
from trimaran.train.comm.waiting import WaitClock
from trimaran.train.engine.trainer import StepResult, Trainer
from trimaran.train.run.course import Course, StopSignals
from trimaran.train.run.device import choose_device
from trimaran.train.run.first_weights import first_weights, goes_on
from trimaran.train.run.log import History, Log, iteration_of
from trimaran.train.run.meeting import connect
from trimaran.train.run.memory import memory_parts, memory_record, resident_gib
from trimaran.train.run.outcome import write_result
from trimaran.train.run.samples import validation_is_due
from trimaran.train.run.slow_ranks import SlowRanks
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

    The ranks meet in `store`, or at their launcher's meeting point where it is None. Raises TrimaranError where
    all steps were made before and their log is lost.
    """
    alive = heartbeat.beat
    stop = StopSignals() if job.saves else None
    device = choose_device(job)
    with heartbeat.during(RankPhase.CONNECT):
        if world_size > 1:
            connect(store, rank, world_size, device, RunFile.FLIGHT.of(job.out_dir, rank))
        clock = WaitClock(on_gpu=device.type == "cuda")
        mesh = build_mesh(job.layout, rank, range(world_size), GroupFactory(device, clock))
    assert mesh is not None, "every rank of the world is in the layout"
    baseline_gib = resident_gib()
    with heartbeat.during(RankPhase.BUILD):
        first = first_weights(job, alive, replaced=goes_on(job, mesh.world, device))
        trainer = Trainer(job, mesh, samples, device, first, on_action=lambda action: alive())
    with heartbeat.during(RankPhase.RESUME):
        tell = Notices(RunFile.NOTICES.of(job.out_dir) if rank == 0 else None).tell
        course = Course(trainer, stop, tell, heartbeat)
        log = Log(job, trainer.step_number, alive) if rank == 0 else None
        if trainer.step_number:
            # trackers take their time with earlier steps, and no rank is to wait for that in a step
            mesh.world.meet(device)
    history = History() if log is None else History.of(log.earlier)

    slow_ranks = SlowRanks(job.layout)

    heartbeat.enter(RankPhase.STEP)
    made = samples_before = 0
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
            # own seconds are those of the step before, and a first step warms up
            for slow in slow_ranks.after(result.own_s, samples_before) if made > 1 else ():
                tell(Notice.SLOW, step=trainer.step_number, rank=slow.rank, why=slow.sentence)
        made, samples_before = made + 1, result.global_batch
        step = trainer.step_number
        if course.after(result):
            return STOPPED
        history.go_back(step - trainer.step_number)
    course.finish()
    if trainer.outer is not None:
        trainer.outer.settle()  # what is on its way needs every rank

    if log is not None and not history.sec_per_it:
        raise TrimaranError(
            f"all {job.steps} steps were made before, and their log is lost: raise train.steps to go on"
        )
    memory = memory_parts(trainer.flat, trainer.states, memory_record(device, baseline_gib))
    write_result(trainer, history, heartbeat.seconds, memory)
    if world_size > 1:
        dist.destroy_process_group()
    return 0


def _timed_step(trainer: Trainer, *, record: bool) -> tuple[StepResult, float]:
    """One iteration and its seconds. `record` leaves the timeline of the first replica's pipeline in a file a stage."""
    mesh = trainer.mesh
    clock = mesh.world.clock
    if record:
        trainer.recorder.start(mesh.world)
    clock.take()
    begin = time.perf_counter()
    result = trainer.step()
    trainer.recorder.synchronize()
    seconds = time.perf_counter() - begin
    trainer.own_s = max(0.0, seconds - clock.take())
    if record and not any(mesh.along[axis].index for axis in ("dp", "cp", "tp")):
        timeline = trainer.recorder.stop().model_dump(mode="json")
        write_json(RunFile.TIMELINE.of(trainer.job.out_dir, mesh.pp.index), timeline)
    return result, seconds
