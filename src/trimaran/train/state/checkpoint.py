"""Checkpoints: saved while the training goes on, put in place whole, and read again on any layout."""

from __future__ import annotations

import functools
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import TrainJob
from trimaran.protocol.notices import Tell
from trimaran.train.engine.flat_weights import FlatWeights
from trimaran.train.engine.trainer import Trainer
from trimaran.train.state.checkpoint_storage import (
    FolderReader,
    FolderWriter,
    PieceLoadPlanner,
    PieceSavePlanner,
    going_folder,
    remove_left_overs,
)
from trimaran.train.state.manifest import (
    DamagedError,
    Manifest,
    folder_name,
    read_manifest,
    saved_steps,
    verify,
)
from trimaran.train.state.pieces import Piece, pieces_of
from trimaran.train.state.weight_source import immaterial_fields

# A rank that waits longer than this for the others' part of a checkpoint has lost them.
SAVE_TIMEOUT = timedelta(minutes=30)
ALIVE_EVERY_S = 1.0

# a training of one process says so by having no process group
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@functools.cache
def saving_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group in which checkpoints of `ranks` are agreed on, beside the training's own.

    Every rank of the world has to ask for it, members or not. It is gloo's on every device: what is saved lies in
    host memory.
    """
    if len(ranks) == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(list(ranks), backend="gloo", timeout=SAVE_TIMEOUT)
    return group


def data_facts(job: TrainJob) -> dict[str, Any]:
    """What text the training sees; token folders are named after their content."""
    return {"tokens": Path(job.data_dir).name}


def saved_pieces(trainer: Trainer) -> list[Piece]:
    """What this rank writes: every element of the model's state is some one rank's to write."""
    flat, mesh, layout = trainer.flat, trainer.mesh, trainer.job.layout
    # but for plain data parallelism no two data-parallel ranks own the same
    shared = layout.zero_stage == 0 and layout.dp_kind == "all_reduce"
    replicas, replica = (mesh.dp.size, mesh.dp.index) if shared else (1, 0)
    return _pieces(trainer, [name for name, by in writers(flat, replicas, mesh.tp.index).items() if by == replica])


def wanted_pieces(trainer: Trainer) -> list[Piece]:
    """What this rank needs to go on."""
    return _pieces(trainer, trainer.flat.places)


def _pieces(trainer: Trainer, names: Iterable[str]) -> list[Piece]:
    """Master weights and optimizer state of the weights `names`, as far as this rank owns them."""
    flat, chosen = trainer.flat, list(names)
    state = {"weights": flat.master, **trainer.optimizer.state}
    found = (pieces_of(flat, chosen, trainer.mesh.tp.index, held, kind) for kind, held in state.items())
    return [piece for pieces in found for piece in pieces]


def writers(flat: FlatWeights, replicas: int, tp_index: int) -> dict[str, int]:
    """Which of several ranks that own the same writes each weight, so that all write about as much.

    Missing are the weights that another rank writes: copies of a tied embedding, and what TP repeats.
    """
    load = [0] * replicas
    chosen = {}
    for name, place in sorted(flat.places.items(), key=lambda item: (-item[1].weight.numel(), item[0])):
        if place.spec.tied_copy or (place.spec.shard_dim is None and tp_index > 0):
            continue
        chosen[name] = load.index(min(load))
        load[chosen[name]] += place.weight.numel()
    return chosen


class Saver:
    """Saves checkpoints of one training into a folder.

    The step waits only until its state is copied to host memory; writing goes on beside the following steps, one
    checkpoint at a time. Rank 0 keeps the newest `keep` and tells of each one written, or not. While the training
    waits for one, it gives a sign of life (`alive`) every second.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        keep: int,
        group: dist.ProcessGroup | None,
        tell: Tell,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._trainer, self._folder, self._keep, self._group, self._tell = trainer, folder, keep, group, tell
        self._alive = alive
        self._rank = trainer.mesh.world.index
        # what was learned can be read again only with the tokenizer
        self._beside = [path for path in [Path(trainer.job.data_dir) / "tokenizer.json"] if path.exists()]
        self._staged: list[Piece] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._failure: str | None = None
        if self._rank == 0:
            remove_left_overs(folder)

    def save(self) -> None:
        """Take the state as it is now; it is written later."""
        begin = time.perf_counter()
        self._wait()
        waited = time.perf_counter() - begin
        staged = self._stage()
        blocked = time.perf_counter() - begin
        head = manifest_head(self._trainer)
        self._writing = self._thread.submit(self._write, head, staged, blocked, waited)

    def finish(self) -> None:
        """Wait until all is written. Raises TrimaranError where the last checkpoint could not be."""
        self._wait()
        self._thread.shutdown()
        if self._failure is not None:
            raise TrimaranError(f"{self._failure}: free space or mend {self._folder}, then go on with --resume")

    def _wait(self) -> None:
        while self._writing is not None:
            self._alive()
            if wait([self._writing], timeout=ALIVE_EVERY_S).done:
                self._writing.result()
                self._writing = None

    def _stage(self) -> list[Piece]:
        """Copies of all pieces in host memory that is kept from one checkpoint to the next."""
        live = saved_pieces(self._trainer)
        pinned = self._trainer.device.type == "cuda"
        if self._staged is None:
            self._staged = [
                replace(piece, tensor=torch.empty_like(piece.tensor, device="cpu", pin_memory=pinned)) for piece in live
            ]
        for copy, piece in zip(self._staged, live, strict=True):
            copy.tensor.copy_(piece.tensor, non_blocking=pinned)
        if pinned:
            torch.cuda.synchronize(self._trainer.device)
        return self._staged

    def _write(self, head: Manifest, pieces: list[Piece], blocked_s: float, waited_s: float) -> None:
        begin = time.perf_counter()
        checkpoint = self._folder / folder_name(head.step)
        try:
            save(
                {},
                storage_writer=FolderWriter(checkpoint, head, self._rank, self._beside),
                planner=PieceSavePlanner(pieces),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            self._failure = f"checkpoint of step {head.step} could not be written: {_first_reason(error)}"
            if self._rank == 0:
                self._tell({"kind": "not_saved", "step": head.step, "text": f"{self._failure}; the training goes on"})
            return
        self._failure = None
        if self._rank == 0:
            seconds = time.perf_counter() - begin
            self._tell({"kind": "saved", "step": head.step, "path": str(checkpoint), "write_s": seconds}
                       | {"blocked_s": blocked_s, "waited_s": waited_s})  # fmt: skip
            self._drop_old(head.step)

    def _drop_old(self, newest: int) -> None:
        for step in [step for step in saved_steps(self._folder) if step <= newest][self._keep :]:
            going = going_folder(self._folder / folder_name(step))
            (self._folder / folder_name(step)).rename(going)
            shutil.rmtree(going, ignore_errors=True)


def _first_reason(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, OSError):
        return f"rank {rank}: {cause.strerror or cause}"
    return f"rank {rank}: {cause}"


def manifest_head(trainer: Trainer) -> Manifest:
    """The manifest of the training as it stands, without tensors."""
    job = trainer.job
    return Manifest(
        step=trainer.step_number,
        consumed_samples=trainer.consumed_samples,
        layout=job.layout.label(),
        workload=job.workload.model_dump(mode="json"),
        train=job.train.model_dump(mode="json"),
        data=data_facts(job),
        state=trainer.counts(),
    )


# What may not change between a checkpoint and the training that goes on from it: the loss would mean something else.
_FIXED = ("workload.model", "workload.seq_len", "workload.optimizer", "train.seed", "train.validation", "data.tokens")
# What may change without a word: it has no part in the loss.
_FREE = (
    "train.steps",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.eval_every",
    "train.eval_steps",
    "train.init_from",
)


@dataclass(frozen=True)
class _Difference:
    field: str
    before: Any
    now: Any


def differences(manifest: Manifest, job: TrainJob) -> tuple[str, ...]:
    """What the recipe states otherwise than the checkpoint, for the user to know.

    Raises TrimaranError naming both values where the training could not go on.
    """
    told = []
    free = {*_FREE, *(f"workload.model.{field}" for field in immaterial_fields(job.workload.model))}
    for part, before, now in (
        ("workload", manifest.workload, job.workload.model_dump(mode="json")),
        ("train", manifest.train, job.train.model_dump(mode="json")),
        ("data", manifest.data, data_facts(job)),
    ):
        for difference in _differing(part, before, now):
            field = difference.field
            if field in free:
                continue
            sentence = f"{field} is {difference.now}, the checkpoint has {difference.before}"
            if any(field == fixed or field.startswith(f"{fixed}.") for fixed in _FIXED):
                raise TrimaranError(f"{sentence}: restore it in the recipe, or train anew without --resume")
            told.append(sentence)
    return tuple(told)


def _differing(path: str, before: Any, now: Any) -> Iterator[_Difference]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in (name for name in now if name in before):
            yield from _differing(f"{path}.{name}", before[name], now[name])
    elif before != now:
        yield _Difference(path, before, now)


def resume(trainer: Trainer, folder: Path, tell: Tell, alive: Callable[[], None] = lambda: None) -> bool:
    """Put `trainer` where the newest whole checkpoint in `folder` was; False where there is none.

    All ranks must call it. One that is not whole is told of and passed over. What is read gives signs of life
    (`alive`); a rank that waits for another to read gives none. Raises TrimaranError where none of several is whole,
    or the recipe has changed.
    """
    world = trainer.mesh.world
    passed_over = 0
    bound = None
    while (step := _newest(folder, bound, trainer)) is not None:
        checkpoint = folder / folder_name(step)
        damage = None
        try:
            verify(checkpoint, world.index, world.size, alive)
        except DamagedError as error:
            damage = str(error)
        if not _any(damage is not None, trainer):
            break
        if world.index == 0:
            tell(
                {
                    "kind": "damaged",
                    "step": step,
                    "text": f"checkpoint {checkpoint} is passed over: {_damage(checkpoint, alive)}",
                }
            )
        passed_over += 1
        bound = step
    if step is None and passed_over:
        raise TrimaranError(f"checkpoints: none of the {passed_over} in {folder} is whole: train anew without --resume")
    if step is None:
        return False
    manifest = read_manifest(checkpoint)
    changed = differences(manifest, trainer.job)
    load_pieces(checkpoint, wanted_pieces(trainer), alive)
    trainer.go_on_from(manifest.step, manifest.consumed_samples, manifest.state)
    if world.index == 0:
        tell({"kind": "resumed", "step": step, "path": str(checkpoint), "layout": manifest.layout, "changed": changed})
    return True


def load_pieces(checkpoint: Path, pieces: Iterable[Piece], alive: Callable[[], None]) -> None:
    """Fill the pieces from a checkpoint, by this rank alone. Raises TrimaranError where it does not hold them."""
    try:
        load({}, storage_reader=FolderReader(checkpoint, alive), planner=PieceLoadPlanner(list(pieces)), no_dist=True)
    except DamagedError as error:
        raise TrimaranError(f"checkpoint {checkpoint}: {error}") from None
    except CheckpointException as error:
        raise TrimaranError(f"checkpoint {checkpoint}: {_first_reason(error)}") from None


def _damage(checkpoint: Path, alive: Callable[[], None]) -> str:
    try:
        verify(checkpoint, alive=alive)
    except DamagedError as error:
        return str(error)
    return "another rank could not read it"


def _newest(folder: Path, bound: int | None, trainer: Trainer) -> int | None:
    """The newest step below `bound` that rank 0 sees a checkpoint of: file systems may show others something older."""
    steps = [step for step in saved_steps(folder) if bound is None or step < bound]
    number = torch.tensor([float(steps[0]) if steps else -1.0], dtype=torch.float64, device=trainer.device)
    if trainer.mesh.world.index > 0:
        number.zero_()
    trainer.mesh.world.all_reduce(number)
    return None if number.item() < 0 else round(number.item())


def _any(flag: bool, trainer: Trainer) -> bool:
    number = torch.tensor([float(flag)], dtype=torch.float64, device=trainer.device)
    trainer.mesh.world.all_reduce(number)
    return number.item() > 0
