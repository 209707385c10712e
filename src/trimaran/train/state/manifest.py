"""A checkpoint's manifest and checksums: plain JSON and text, nothing that can run code."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from trimaran.files.user_file import MIB, open_file, read_bytes
from trimaran.nouns.noun import Noun, TrimaranError, first_error
from trimaran.protocol.job import TrainJob

FORMAT: Literal["trimaran-checkpoint-1"] = "trimaran-checkpoint-1"
MANIFEST_NAME = "manifest.json"
# In the format of sha256sum: `sha256sum -c SHA256SUMS` checks a checkpoint without Trimaran.
SUMS_NAME = "SHA256SUMS"
# A manifest has a line for each tensor and each rank's share of it, sums a line for each rank.
MANIFEST_BYTES, SUMS_BYTES = 1024 * MIB, 64 * MIB
_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")
_FOLDER = re.compile(r"step-(\d{8,})")
_READ_BYTES = 1 << 24


class DamagedError(Exception):
    """A checkpoint that is not whole; the message names the file and what is wrong with it."""


class Chunk(Noun):
    """A box of a tensor that lies in one file: `offsets` and `sizes` by dimension, in elements."""

    file: int = Field(ge=0, description="index in Manifest.files")
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SavedTensor(Noun):
    """A tensor of the whole model: its full shape, without padding, and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Manifest(Noun):
    """Where a training stood, what was trained, and where each tensor lies.

    `workload` and `train` are the recipe's, `data` names the text; `state` holds what else the trainer needs to go
    on (counts of the optimizer, the loss scale), `recent_losses` those by which a leap of the loss is told.
    """

    format: Literal["trimaran-checkpoint-1"] = FORMAT
    step: int = Field(ge=0)
    consumed_samples: int = Field(ge=0)
    layout: str
    workload: dict[str, Any]
    train: dict[str, Any]
    data: dict[str, Any]
    state: dict[str, float]
    recent_losses: tuple[float, ...] = ()
    files: tuple[Annotated[str, Field(pattern=r"^[\w.-]+$")], ...] = ()
    tensors: dict[str, SavedTensor] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                if not chunk.file < len(self.files) or not len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape):
                    raise ValueError(f"a chunk of tensor {name} is nowhere in the {len(self.files)} files")
        return self


def data_facts(job: TrainJob) -> dict[str, Any]:
    """What text the training sees; token folders are named after their content."""
    return {"tokens": Path(job.data_dir).name}


def chunk_key(offsets: Iterable[int]) -> str:
    """A chunk's name in its file, after the tensor's: `@0,128`."""
    return "@" + ",".join(map(str, offsets))


def folder_name(step: int) -> str:
    """A checkpoint's folder."""
    return f"step-{step:08d}"


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, whole or damaged, newest first."""
    if not folder.is_dir():
        return []
    matches = (_FOLDER.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint. Raises DamagedError."""
    path = checkpoint / MANIFEST_NAME
    try:
        return Manifest.model_validate_json(read_bytes(path, path.name, MANIFEST_BYTES))
    except TrimaranError as error:
        raise DamagedError(str(error)) from None
    except ValidationError as error:
        raise DamagedError(f"{path.name} is not one: {first_error(error)}") from None


def verify(checkpoint: Path, share: int = 0, shares: int = 1, alive: Callable[[], None] = lambda: None) -> None:
    """Read every `shares`-th file of a checkpoint, from file number `share` on, and compare it with its checksum.

    The manifest, and what lies beside the tensors (the tokenizer), are checked whatever the share. `alive` is called
    with each block read: a large checkpoint takes minutes. Raises DamagedError.
    """
    sums = _read_sums(checkpoint)
    _check(checkpoint, MANIFEST_NAME, sums, alive)
    files = read_manifest(checkpoint).files
    beside = [name for name in sums if name not in {*files, MANIFEST_NAME}]
    for name in (*files[share::shares], *beside):
        _check(checkpoint, name, sums, alive)


def write_durably(path: Path, content: bytes) -> str:
    """Write a file, return once it is on the disk; returns its SHA-256."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def copy_durably(source: Path, target: Path) -> str:
    """Copy a file of any size, return once the copy is on the disk; returns its SHA-256."""
    checksum = hashlib.sha256()
    with open_file(source, source.name, None) as read, target.open("wb") as file:
        while block := read.read(_READ_BYTES):
            checksum.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return checksum.hexdigest()


def sync_folder(folder: Path) -> None:
    """Return once a folder's entries are on the disk: a file whose name is lost is lost."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_sums(checkpoint: Path) -> dict[str, str]:
    path = checkpoint / SUMS_NAME
    try:
        lines = read_bytes(path, path.name, SUMS_BYTES).decode(errors="replace").splitlines()
    except TrimaranError as error:
        raise DamagedError(str(error)) from None
    return dict(_parsed(lines))


def _parsed(lines: list[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, start=1):
        match = _SUM_LINE.fullmatch(line)
        if match is None:
            raise DamagedError(f"line {number} of {SUMS_NAME} is garbage")
        yield match[2], match[1]


def _check(checkpoint: Path, name: str, sums: dict[str, str], alive: Callable[[], None]) -> None:
    if name not in sums:
        raise DamagedError(f"{SUMS_NAME} has no line for {name}")
    checksum = hashlib.sha256()
    for block in _blocks(checkpoint / name):
        alive()
        checksum.update(block)
    digest = checksum.hexdigest()
    if digest != sums[name]:
        raise DamagedError(f"{name} has changed: its checksum is {digest[:12]}, written was {sums[name][:12]}")


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open_file(path, path.name, None) as file:
            while block := file.read(_READ_BYTES):
                yield block
    except TrimaranError as error:
        raise DamagedError(str(error)) from None
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from None
