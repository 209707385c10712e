"""Resuming a training from its newest whole checkpoint, on any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from trimaran.files.same_model import immaterial_fields
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import Workload
from trimaran.protocol.job import TrainJob
from trimaran.protocol.notices import Notice, Tell
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.engine.learning_rate import Position, learning_rate
from trimaran.train.engine.trainer import Trainer
from trimaran.train.state.checkpoint_reader import load_pieces
from trimaran.train.state.manifest import (
    DamagedError,
    Manifest,
    data_facts,
    folder_name,
    read_manifest,
    saved_steps,
    verify,
)
from trimaran.train.state.pieces import replicas_own, state_pieces
from trimaran.train.state.replicas import check_local_steps, keeps_errors

# What may not change between a checkpoint and the training that goes on from it: it would be another training.
_FIXED = ("workload.model", "workload.seq_len", "workload.optimizer", "train.seed", "train.validation", "data.tokens")
# What may change without being told: the loss does not depend on it.
_FREE = (
    "train.steps",
    "train.checkpoint_every",
    "train.checkpoint_minutes",
    "train.snapshot_seconds",
    "train.restarts",
    "train.keep_checkpoints",
    "train.bad_steps",
    "train.eval_every",
    "train.eval_steps",
    "train.init_from",
)


def differences(manifest: Manifest, job: TrainJob) -> tuple[str, ...]:
    """Sentences on what the recipe states otherwise than the checkpoint, for the user to know.

    Raises TrimaranError naming both values where the training could not go on.
    """
    sentences = []
    free = {*_FREE, *(f"workload.model.{field}" for field in immaterial_fields(job.workload.model))}
    for part, saved, stated in (
        ("workload", manifest.workload, job.workload.model_dump(mode="json")),
        ("train", manifest.train, job.train.model_dump(mode="json")),
        ("data", manifest.data, data_facts(job)),
    ):
        for field, before, now in _differing(part, saved, stated):
            if field in free:
                continue
            sentence = f"{field} is {now}, the checkpoint has {before}"
            if any(field == fixed or field.startswith(f"{fixed}.") for fixed in _FIXED):
                raise TrimaranError(f"{sentence}: restore it in the recipe, or train anew without --resume")
            sentences.append(sentence)
    return tuple(sentences)


def _another_rate(manifest: Manifest, job: TrainJob) -> Iterator[str]:
    """A sentence where the next step's learning rate is not what the checkpoint's recipe would have made it.

    A schedule whose decay is not stated runs over all steps: a recipe with more of them raises the rate at once.
    """
    try:
        before, of = TrainSettings.model_validate(manifest.train), Workload.model_validate(manifest.workload)
    except ValidationError:
        return  # of another version, whose schedule may have been another too
    step, samples = manifest.step, manifest.consumed_samples
    was, now = (
        learning_rate(settings, Position(step, samples, workload.batch_at(samples), workload.seq_len))
        for settings, workload in ((before, of), (job.train, job.workload))
    )
    if not math.isclose(was, now):
        way_out = ""
        if before.steps != job.train.steps and not any((before.decay_steps, before.decay_samples, before.decay_tokens)):
            way_out = (
                f": it falls over train.steps, now {job.train.steps} and then {before.steps}; "
                f"train.decay_steps = {before.steps} keeps it"
            )
        yield f"the next step's learning rate is {now:.4g} instead of {was:.4g}{way_out}"


def _differing(path: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each field under `path` that differs, with its values before and now."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in (name for name in now if name in before):
            yield from _differing(f"{path}.{name}", before[name], now[name])
    elif before != now:
        yield path, before, now


def resume(trainer: Trainer, folder: Path, tell: Tell, alive: Callable[[], None] = lambda: None) -> bool:
    """Continue from the newest whole checkpoint in `folder`; False where there is no checkpoint.

    All ranks must call it. A damaged checkpoint is told of and passed over. Reading gives signs of life (`alive`); a
    rank that waits for another to read gives none. Raises TrimaranError where there are checkpoints but none is
    whole, or where the recipe has changed.
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
            passed = f"checkpoint {checkpoint} is passed over: {_damage(checkpoint, alive)}"
            tell(Notice.DAMAGED, step=step, text=passed)
        passed_over += 1
        bound = step
    if step is None and passed_over:
        raise TrimaranError(f"checkpoints: none of the {passed_over} in {folder} is whole: train anew without --resume")
    if step is None:
        return False
    manifest = read_manifest(checkpoint)
    _require_state(manifest, checkpoint)
    changed = (*differences(manifest, trainer.job), *_another_rate(manifest, trainer.job))
    check_local_steps(manifest.layout, trainer.job.layout)
    pieces = state_pieces(trainer, saving=False)
    if trainer.sums.state and not keeps_errors(manifest.layout, trainer.job.layout):
        kinds = {replicas_own(name, trainer.mesh) for name in trainer.sums.state}
        pieces = [piece for piece in pieces if piece.name.split("/")[0] not in kinds]
        trainer.sums.forget()
        changed += (f"layout is {trainer.job.layout}, and what other replicas had not sent is left out",)
    load_pieces(checkpoint, pieces, alive)
    trainer.go_on_from(manifest.step, manifest.consumed_samples, manifest.state)
    trainer.losses.recent = manifest.recent_losses
    if world.index == 0:
        tell(Notice.RESUMED, step=step, path=str(checkpoint), layout=manifest.layout, changed=changed)
    return True


def _require_state(manifest: Manifest, checkpoint: Path) -> None:
    """Raise TrimaranError where the counts are not all there: sums are right for whatever they were made of."""
    needed = ("updates", "good_steps") if "loss_scale" in manifest.state else ("updates",)
    for name in needed:
        if manifest.state.get(name, -1.0) < 0:
            raise TrimaranError(
                f"checkpoint {checkpoint}: state.{name} is {manifest.state.get(name, 'missing')}, expected a count: "
                f"its manifest was changed; remove it to go on from the one before, or train without --resume"
            )


def _damage(checkpoint: Path, alive: Callable[[], None]) -> str:
    try:
        verify(checkpoint, alive=alive)
    except DamagedError as error:
        return str(error)
    return "another rank could not read it"


def _newest(folder: Path, bound: int | None, trainer: Trainer) -> int | None:
    """The newest step below `bound` with a checkpoint, as rank 0 sees it: other machines may see an older folder."""
    steps = [step for step in saved_steps(folder) if bound is None or step < bound]
    number = torch.tensor([float(steps[0]) if steps else -1.0], dtype=torch.float64, device=trainer.device)
    if trainer.mesh.world.index > 0:
        number.zero_()
    trainer.mesh.world.all_reduce(number)
    return None if number.item() < 0 else round(number.item())


def _any(flag: bool, trainer: Trainer) -> bool:
    """Whether the flag is True on any rank."""
    number = torch.tensor([float(flag)], dtype=torch.float64, device=trainer.device)
    trainer.mesh.world.all_reduce(number)
    return number.item() > 0
