"""The weights of a checkpoint as whole tensors by name, read without a trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trimaran.files.user_file import regular_file
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.protocol.files import CHECKPOINTS
from trimaran.train.state.manifest import (
    MANIFEST_NAME,
    DamagedError,
    chunk_key,
    folder_name,
    read_manifest,
    saved_steps,
    verify,
)

_PREFIX = "weights/"


def find_checkpoint(path: Path, alive: Callable[[], None] = lambda: None) -> Path | None:
    """The checkpoint that `path` is, or the newest whole one in it: a folder of checkpoints, or a study's folder.

    None where there is none. Raises TrimaranError where there are, but none is whole.
    """
    if (path / MANIFEST_NAME).exists():
        candidates = [path]
    else:
        folder = path if saved_steps(path) else path / CHECKPOINTS
        candidates = [folder / folder_name(step) for step in saved_steps(folder)]
    damage = None
    for candidate in candidates:
        try:
            verify(candidate, alive=alive)
            return candidate
        except DamagedError as error:
            damage = damage or f"{candidate}: {error}"
    if damage is not None:
        raise TrimaranError(f"checkpoint {damage}: none of {len(candidates)} there is whole")
    return None


class CheckpointWeights:
    """The weights of a checkpoint, each read on request and put together from its chunks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._manifest = read_manifest(folder)
            self.model = Model.model_validate(self._manifest.workload["model"])
        except (DamagedError, KeyError) as error:
            raise TrimaranError(f"checkpoint {folder}: {error}") from None
        except ValidationError as error:
            raise TrimaranError(f"checkpoint {folder}: its model is not one: {first_error(error)}") from None

    def read(self, name: str) -> Tensor:
        """The weight `name` of the whole model in its master precision. Raises TrimaranError."""
        key = _PREFIX + name
        if key not in self._manifest.tensors:
            raise TrimaranError(f"checkpoint {self.folder} has no tensor {key}: it is of another model or version")
        saved = self._manifest.tensors[key]
        whole: Tensor | None = None
        for chunk in saved.chunks:
            path = self.folder / self._manifest.files[chunk.file]
            try:
                with safe_open(regular_file(path, path.name, None), framework="pt") as file:
                    part = file.get_tensor(key + chunk_key(chunk.offsets))
            except (OSError, SafetensorError, TrimaranError) as error:
                raise TrimaranError(f"checkpoint file {path} cannot be read ({error})") from None
            if whole is None:
                whole = torch.empty(saved.shape, dtype=part.dtype)
            spans = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(begin, begin + size) for begin, size in spans)] = part
        if whole is None:
            raise TrimaranError(f"checkpoint {self.folder}: tensor {key} has no chunks")
        return whole
