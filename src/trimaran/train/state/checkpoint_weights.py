"""The weights of a checkpoint as whole tensors by name, read without a trainer."""

from __future__ import annotations

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trimaran.files.user_file import regular_file
from trimaran.nouns.noun import TrimaranError
from trimaran.train.state.manifest import chunk_key
from trimaran.train.state.weight_files import CheckpointFiles

_PREFIX = "weights/"


class CheckpointWeights:
    """The weights of a checkpoint, each read on request and put together from its chunks."""

    def __init__(self, files: CheckpointFiles) -> None:
        self.folder, self.model, self._manifest = files.folder, files.model, files.manifest

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
