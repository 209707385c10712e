"""Saving checkpoints while the training goes on; each is put in place whole."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.notices import Notice, Tell
from trimaran.train.engine.trainer import Save, Trainer
from trimaran.train.state.checkpoint_writer import (
    FolderWriter,
    PieceSavePlanner,
    first_reason,
    going_folder,
    partial_folder,
    remove,
    remove_left_overs,
)
from trimaran.train.state.held import HeldSnapshots, NotHeldError
from trimaran.train.state.manifest import Manifest, data_facts, folder_name, saved_steps
from trimaran.train.state.pieces import Piece, state_pieces

# A rank that waits longer than this for the other ranks' parts of a checkpoint takes them for lost.
SAVE_TIMEOUT = timedelta(minutes=30)
ALIVE_EVERY_S = 1.0


@functools.cache
def saving_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group in which `ranks` agree on their checkpoints, beside the groups of the training.

    Every rank of the world has to ask for it, members or not. It is gloo's on every device: what is saved lies in
    host memory.
    """
    if len(ranks) == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(list(ranks), backend="gloo", timeout=SAVE_TIMEOUT)
    return group


class Saver:
    """Saves checkpoints of a training into a folder.

    The step waits only until its state is copied to host memory; writing goes on beside the following steps, a single
    checkpoint at a time. Rank 0 keeps the newest `keep` and tells of each that was written or could not be. While the
    training waits for a checkpoint, it gives a sign of life (`alive`) every second. In the same way it has nodes hold
    snapshots (`held`).
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        keep: int,
        group: dist.ProcessGroup | None,
        tell: Tell,
        alive: Callable[[], None] = lambda: None,
        held: HeldSnapshots | None = None,
    ) -> None:
        self._trainer, self._folder, self._keep, self._group, self._tell = trainer, folder, keep, group, tell
        self._alive, self._held = alive, held
        self._rank = trainer.mesh.world.index
        # the weights are of use only with the tokenizer
        self._beside = [path for path in [Path(trainer.job.data_dir) / "tokenizer.json"] if path.exists()]
        self._staged: list[Piece] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._failure: str | None = None
        if self._rank == 0:
            remove_left_overs(folder)

    @property
    def may_hold(self) -> bool:
        """Whether a snapshot can be held now: nodes have room for it, and nothing is being written."""
        return self._held is not None and self._held.holds and (self._writing is None or self._writing.done())

    def save(self, what: Save = Save.WRITE) -> bool:
        """Copy the state as it is now; it is written, or held, later. False where numbers in it are not finite."""
        begin = time.perf_counter()
        # every element of the model's state is counted, and so written, by exactly one rank
        pieces = state_pieces(self._trainer, saving=True)
        if not self._all_finite(pieces):
            return False
        wait_begin = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - wait_begin
        staged = self._stage(pieces)
        blocked = time.perf_counter() - begin
        head = manifest_head(self._trainer)
        if what == Save.WRITE:
            self._writing = self._thread.submit(self._write, head, staged, blocked, waited)
        elif self._held is not None and self._held.holds:
            self._writing = self._thread.submit(self._hold, self._held, head, staged, blocked)
        return True

    def finish(self) -> None:
        """Wait until all is written. Raises TrimaranError where the last checkpoint could not be written."""
        self.wait()
        self._thread.shutdown()
        if self._failure is not None:
            raise TrimaranError(f"{self._failure}: free space or mend {self._folder}, then go on with --resume")

    def wait(self) -> None:
        """Wait until nothing is being written."""
        while self._writing is not None:
            self._alive()
            if wait([self._writing], timeout=ALIVE_EVERY_S).done:
                self._writing.result()
                self._writing = None

    def _all_finite(self, pieces: list[Piece]) -> bool:
        """Whether all that any rank would save is a number; all ranks ask at once."""
        world = self._trainer.mesh.world
        bad = torch.zeros(1, dtype=torch.float64, device=self._trainer.device)
        for piece in pieces:
            self._alive()
            if piece.tensor.numel():
                # no copy of a piece, which may be gigabytes that a device has not left
                ends = torch.stack(torch.aminmax(piece.tensor))
                bad += (~ends.isfinite().all()).to(bad.dtype)
        world.all_reduce(bad)
        return bad.item() == 0

    def _stage(self, pieces: list[Piece]) -> list[Piece]:
        """Copies of all pieces in host memory, which is allocated once for all checkpoints."""
        pinned = self._trainer.device.type == "cuda"
        if self._staged is None:
            self._staged = []
            for piece in pieces:
                self._alive()  # locking the pages of gigabytes takes seconds
                room = torch.empty_like(piece.tensor, device="cpu", pin_memory=pinned)
                self._staged.append(replace(piece, tensor=room))
        for copy, piece in zip(self._staged, pieces, strict=True):
            self._alive()
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
            self._failure = f"checkpoint of step {head.step} could not be written: {first_reason(error)}"
            if self._rank == 0:
                # all ranks are done with it, and what they wrote takes the room that the log needs
                shutil.rmtree(partial_folder(checkpoint), ignore_errors=True)
                goes_on = "; the training goes on" if head.step < self._trainer.job.steps else ""
                self._tell(Notice.NOT_SAVED, step=head.step, text=f"{self._failure}{goes_on}")
            return
        self._failure = None
        if self._rank == 0:
            self._tell(
                Notice.SAVED,
                step=head.step,
                path=str(checkpoint),
                write_s=time.perf_counter() - begin,
                blocked_s=blocked_s,
                waited_s=waited_s,
            )
            self._drop_old(head.step)

    def _hold(self, held: HeldSnapshots, head: Manifest, pieces: list[Piece], blocked_s: float) -> None:
        begin = time.perf_counter()
        try:
            gib = held.hold(head, pieces, self._beside)
        except NotHeldError as error:
            held.holds = False
            text = f"snapshots are not held in memory from here on: {error}; a fault loses what no checkpoint has"
            if self._rank == 0:
                self._tell(Notice.NOT_HELD, text=text)
            return
        if self._rank == 0:
            held_s = time.perf_counter() - begin
            self._tell(Notice.HELD, step=head.step, blocked_s=blocked_s, held_s=held_s, gib=gib)

    def _drop_old(self, newest: int) -> None:
        for step in [step for step in saved_steps(self._folder) if step <= newest][self._keep :]:
            going = going_folder(self._folder / folder_name(step))
            with contextlib.suppress(OSError):  # what cannot be removed, or is gone, is no reason to end a training
                (self._folder / folder_name(step)).rename(going)
            remove(going)


def manifest_head(trainer: Trainer) -> Manifest:
    """The manifest of the training as it stands, without tensors."""
    job = trainer.job
    return Manifest(
        step=trainer.step_number,
        consumed_samples=trainer.consumed_samples,
        recent_losses=trainer.losses.recent,
        layout=job.layout.label(),
        workload=job.workload.model_dump(mode="json"),
        train=job.train.model_dump(mode="json"),
        data=data_facts(job),
        state=trainer.counts(),
    )
