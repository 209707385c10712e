"""One rank from its arguments to its exit status: it reads its job, checks it and trains."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.environment import RANK, WORLD_SIZE
from trimaran.protocol.exits import USER_ERROR
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob, read_job
from trimaran.protocol.phases import Heartbeat, RankPhase
from trimaran.protocol.programs import JOINED
from trimaran.train.run.failure import tell_failure
from trimaran.train.run.importing import importing
from trimaran.train.run.samples import open_data
from trimaran.train.run.supported import check_supported

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def run(arguments: list[str]) -> int:
    """Run one rank; returns the exit status."""
    joined = arguments[-1:] == [JOINED]
    paths = arguments[:-1] if joined else arguments
    if len(paths) != 1 and not (joined and not paths):
        print(f"usage: python -m trimaran.train.process.worker JOB.json, or [JOB.json] {JOINED}", file=sys.stderr)
        return USER_ERROR
    rank, world_size = int(os.environ.get(RANK, "0")), int(os.environ.get(WORLD_SIZE, "1"))
    job: TrainJob | None = None
    try:
        store: Store | None = None
        if joined and world_size > 1:
            # PyTorch, a second that other ranks spend only once their job is known to be right
            with importing():
                from trimaran.train.run.meeting import joined_store, shared_job
            store = joined_store(rank, world_size)
            job = shared_job(paths, rank, store)
        else:
            job = read_job(TrainJob, Path(paths[0]))
        Path(job.out_dir).mkdir(parents=True, exist_ok=True)
        check_supported(job)
        return train(job, rank, world_size, store)
    except Exception as error:
        return tell_failure(error, rank, job)


def train(job: TrainJob, rank: int, world_size: int, store: Store | None) -> int:
    """Train `job` as rank `rank`, from the first sign of life on. Returns the exit status.

    Raises TrimaranError where the ranks are not as many as the layout needs, or the data is wrong.
    """
    if job.layout.devices != world_size:
        raise TrimaranError(
            f"layout {job.layout} needs {job.layout.devices} ranks, but WORLD_SIZE is {world_size}: "
            f"start {job.layout.devices}"
        )
    samples, held_out = open_data(job)
    heartbeat = Heartbeat(RunFile.HEARTBEAT.of(job.out_dir, rank))
    with heartbeat.during(RankPhase.IMPORT_TORCH):
        import_trainer(checkpoints=job.has_checkpoints)  # PyTorch, which a user's mistake should not cost
    from trimaran.train.run.loop import run_steps

    return run_steps(job, rank, world_size, store, samples, held_out, heartbeat)


def import_trainer(*, checkpoints: bool) -> None:
    """Import all that a rank imports as it goes; what reads and writes checkpoints takes a second more."""
    with importing():
        import trimaran.train.run.loop
        import trimaran.train.state.weight_source

        if checkpoints:
            import trimaran.train.state.held
            import trimaran.train.state.resume
            import trimaran.train.state.saver  # noqa: F401
