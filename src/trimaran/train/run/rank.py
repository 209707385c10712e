"""What one rank does from its job file to its result: check, connect, build, train, write down."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.protocol.job import TrainJob
from trimaran.protocol.json_file import write_json
from trimaran.train.run.supported import check_supported
from trimaran.train.text.sampler import Sampler
from trimaran.train.text.tokens import Tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

    from trimaran.train.engine.trainer import StepResult, Trainer
    from trimaran.train.model.weight import Initial, WeightSpec

EXIT_USER_ERROR = 2
# The ranks were started by torchrun or Slurm, and rank 0 alone was given the job.
JOINED = "--joined"
EXIT_OUT_OF_MEMORY = 41

# A rank that waits longer than this for the others has lost them. The harness that started the
# ranks notices sooner, by their heartbeats.
RENDEZVOUS_TIMEOUT = timedelta(minutes=30)


class Phases:
    """Seconds that each phase of the start-up took; the heartbeat file tells the harness which one it is."""

    def __init__(self, heartbeat: Path) -> None:
        self.seconds: dict[str, float] = {}
        self._heartbeat = heartbeat

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Time the block under `name`."""
        self.enter(name)
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin

    def enter(self, name: str) -> None:
        """Tell that phase `name` begins, which is a sign of life too."""
        self._heartbeat.write_text(name)


def read_job(path: Path) -> TrainJob:
    """The job file. Raises TrimaranError naming the file and the field."""
    try:
        return TrainJob.model_validate_json(path.read_text())
    except OSError as error:
        raise TrimaranError(f"job {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise TrimaranError(f"job {path}: {first_error(error)}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text))
    )


def train(job: TrainJob, rank: int, world_size: int, store: Store | None) -> int:
    """Train `job` as rank `rank`; rank 0 writes the log and the result. Returns the exit status."""
    layout, out_dir = job.layout, Path(job.out_dir)
    if layout.devices != world_size:
        raise TrimaranError(
            f"layout {layout} needs {layout.devices} ranks, but WORLD_SIZE is {world_size}: start {layout.devices}"
        )
    sampler, held_out = open_data(job)
    heartbeat = out_dir / f"heartbeat.{rank}"
    phases = Phases(heartbeat)
    with phases.time("import_torch"):
        import torch.distributed as dist

        from trimaran.protocol.notices import Notices
        from trimaran.train.comm.group import GroupFactory
        from trimaran.train.comm.mesh import build_mesh
        from trimaran.train.engine.trainer import Trainer
        from trimaran.train.run.course import EXIT_STOPPED, Course, StopSignals
        from trimaran.train.run.log import History, Log, iteration_of
        from trimaran.train.run.memory import memory_parts, memory_record, resident_gib
        from trimaran.train.run.outcome import write_result

    def alive() -> None:
        os.utime(heartbeat)

    stop = StopSignals() if job.saves else None
    device = choose_device(job)
    with phases.time("connect"):
        if world_size > 1:
            connect(store or meeting_point(rank, world_size), rank, world_size, device, out_dir)
        mesh = build_mesh(layout, rank, range(world_size), GroupFactory(device))
    assert mesh is not None, "every rank of the world is in the layout"
    baseline_gib = resident_gib()
    with phases.time("build"):
        trainer = Trainer(job, mesh, sampler, device, first_weights(job, alive), on_action=lambda action: alive())

    with phases.time("resume"):
        course = Course(trainer, stop, Notices(out_dir, rank).tell, alive)
    log = Log(job, trainer.step_number) if rank == 0 else None
    history = History() if log is None else History.of(log.earlier)
    phases.enter("step")
    while trainer.step_number < job.steps:
        course.before()
        result, seconds = timed_step(trainer, record=job.record_timeline and trainer.step_number == job.steps - 1)
        history.add(result, seconds)
        os.utime(heartbeat)
        if held_out is not None and validation_is_due(job, trainer.step_number):
            history.add_validation(trainer.step_number, trainer.evaluate(held_out))
        if log is not None:
            peak_gib = memory_record(device, baseline_gib)["peak"]
            log.write(iteration_of(trainer, history, peak_gib))
        if course.after(result):
            return EXIT_STOPPED
    course.finish()

    memory = memory_parts(trainer.flat, trainer.optimizer.state, memory_record(device, baseline_gib))
    write_result(trainer, history, phases.seconds, memory)
    if world_size > 1:
        dist.destroy_process_group()
    return 0


def connect(store: Store | None, rank: int, world_size: int, device: torch.device, out_dir: Path) -> None:
    """Join the other ranks; from then on this one can be asked which collective it waits in."""
    import torch.distributed as dist

    from trimaran.train.run.silence import tell_collectives

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=RENDEZVOUS_TIMEOUT)
    tell_collectives(out_dir / f"flight.{rank}.json", on_gpu=device.type == "cuda")


def timed_step(trainer: Trainer, *, record: bool) -> tuple[StepResult, float]:
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
        write_json(Path(trainer.job.out_dir) / f"timeline.{mesh.pp.index}.json", timeline)
    return result, seconds


def meeting_point(rank: int, world_size: int) -> Store | None:
    """The store through which ranks find each other, at MASTER_ADDR and MASTER_PORT, where rank 0 listens.

    A launcher that hands rank 0 its bound socket in TRIMARAN_RENDEZVOUS_FD cannot lose the port to another
    program meanwhile, and decides who may connect. Under torchrun the store is torchrun's own (None).
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    held = os.environ.get("TRIMARAN_RENDEZVOUS_FD") if rank == 0 else None
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        timeout=RENDEZVOUS_TIMEOUT,
        master_listen_fd=None if held is None else int(held),
    )


def joined_store(rank: int, world_size: int) -> Store:
    """The store of ranks that torchrun or Slurm started: torchrun's own, or one at which rank 0 listens."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    found = meeting_point(rank, world_size)
    if found is None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        found = TCPStore(address, port, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
    return PrefixStore(f"trimaran/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", found)


def shared_job(arguments: list[str], rank: int, store: Store) -> TrainJob:
    """The job that rank 0 was given, handed to all ranks. What the others complain of goes to the job's folder."""
    if rank == 0:
        job = read_job(Path(arguments[0]))
        store.set("job", job.model_dump_json())
        return job
    job = TrainJob.model_validate_json(store.get("job"))
    Path(job.out_dir).mkdir(parents=True, exist_ok=True)
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        with (Path(job.out_dir) / f"{name}.{rank}").open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    return job


def open_data(job: TrainJob) -> tuple[Sampler, Sampler | None]:
    """The job's text in the job's order, and what is held out of it where the training is to be validated.

    A trial, which has fewer steps than the training, is not.
    Raises TrimaranError where it does not fit the model, or is too little.
    """
    tokens, vocab = Tokens(Path(job.data_dir)), job.workload.model.vocab
    if tokens.index.vocab > vocab:
        raise TrimaranError(
            f"model.vocab {vocab} is smaller than the {tokens.index.vocab} of the data's tokenizer "
            f"({tokens.index.tokenizer}): raise vocab or tokenise anew"
        )
    settings, seq_len = job.train, job.workload.seq_len
    training = Sampler(tokens, seq_len, settings.seed, validation=settings.validation)
    if settings.eval_every is None or job.steps < settings.steps:
        return training, None
    held_out = Sampler(tokens, seq_len, settings.seed, validation=settings.validation, held_out=True)
    wanted = settings.eval_steps * job.workload.global_batch
    if held_out.samples_per_epoch < wanted:
        raise TrimaranError(
            f"train.eval_steps {settings.eval_steps} x global_batch {job.workload.global_batch} = {wanted} samples are "
            f"more than the {held_out.samples_per_epoch} held out: lower eval_steps or raise train.validation"
        )
    return training, held_out


def validation_is_due(job: TrainJob, step: int) -> bool:
    """Whether the training is validated after `step` steps: every so many, and at the end."""
    every = job.train.eval_every
    return every is not None and (step % every == 0 or step == job.train.steps)


def first_weights(job: TrainJob, alive: Callable[[], None]) -> Initial:
    """What the training begins with: what the recipe names, or numbers drawn from its seed.

    `alive` is called for each weight, and while files are checked: large ones take minutes. Raises TrimaranError where
    the recipe names another model's weights.
    """
    from trimaran.train.model.weight import drawn

    values = drawn(job.train.seed)
    if job.train.init_from is not None:
        from trimaran.train.state.weight_source import check_same_model, initial_from, open_source

        source = open_source(Path(job.train.init_from).expanduser(), alive)
        check_same_model(source, job.workload.model, "train.init_from")
        values = initial_from(source)

    def telling(name: str, spec: WeightSpec) -> Tensor:
        alive()
        return values(name, spec)

    return telling


def choose_device(job: TrainJob) -> torch.device:
    """The device of this rank, made ready for computing."""
    import torch

    torch.set_num_threads(job.threads_per_rank)
    # subnormal numbers cost a CPU a hundred times an ordinary one and teach nothing
    torch.set_flush_denormal(True)
    if job.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrimaranError("device cuda is asked for, but PyTorch finds none here: set device to cpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        raise TrimaranError(
            f"local rank {local_rank} has no CUDA device, this node shows {count}: start at most {count} ranks a node"
        )
    # a scheduler may show every rank its own device alone (srun --gpus-per-task=1)
    device = torch.device("cuda", local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def run(arguments: list[str]) -> int:
    """Run one rank; returns the exit status."""
    joined = arguments[-1:] == [JOINED]
    paths = arguments[:-1] if joined else arguments
    if len(paths) != 1 and not (joined and not paths):
        print(f"usage: python -m trimaran.train.process.worker JOB.json, or [JOB.json] {JOINED}", file=sys.stderr)
        return EXIT_USER_ERROR
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    out_dir: Path | None = None
    try:
        store = joined_store(rank, world_size) if joined and world_size > 1 else None
        job = shared_job(paths, rank, store) if store else read_job(Path(paths[0]))
        out_dir = Path(job.out_dir)
        out_dir.mkdir(parents=True, exist_ok=True)
        check_supported(job)
        return train(job, rank, world_size, store)
    except TrimaranError as error:
        print(f"trimaran: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        print(f"trimaran: rank {rank} is out of memory: {line}", file=sys.stderr)
        if out_dir is not None:
            write_json(out_dir / f"error.{rank}.json", {"kind": "oom", "message": line})
        return EXIT_OUT_OF_MEMORY
