"""Weights from and to Hugging Face folders: config.json and safetensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trimaran.files.hugging_face_config import config_from_model
from trimaran.files.user_file import regular_file
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.train.state.hugging_face_tensors import FAMILIES, check_known, entries, shapes
from trimaran.train.state.weight_files import (
    CONFIG_NAME,
    INDEX_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    HuggingFaceFiles,
)
from trimaran.train.text.tokenizer import HuggingFace

# Larger models are written as several files, as Hugging Face's libraries do.
SHARD_BYTES = 5 * 10**9


class HuggingFaceWeights:
    """The weights of a Hugging Face folder under our names, each read on request.

    Raises TrimaranError where the folder has tensors of another model.
    """

    def __init__(self, files: HuggingFaceFiles) -> None:
        self.folder, self.model = files.folder, files.model
        self._entries = entries(self.model, files.kind)
        self._shapes = shapes(self.model, files.kind)
        self._prefix = FAMILIES[files.kind].prefix
        self._file_of = files.file_of
        check_known(files.file_of, self.model, files.kind, str(files.folder))

    def read(self, name: str) -> Tensor:
        """The weight `name` of the whole model, as it is stored; vocabulary without padding. Raises TrimaranError."""
        entry = self._entries[name]
        return entry.join(self.model, [self._read(theirs) for theirs in entry.theirs]).contiguous()

    def _read(self, name: str) -> Tensor:
        # the first published files of GPT-2 and BLOOM leave the prefix out
        stored = name if name in self._file_of else name.removeprefix(self._prefix)
        if stored not in self._file_of:
            raise TrimaranError(f"{self.folder} has no tensor {name}: its files are not those of its {CONFIG_NAME}")
        path = self.folder / self._file_of[stored]
        try:
            with safe_open(regular_file(path, f"weights {path}", None), framework="pt") as file:
                tensor: Tensor = file.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise TrimaranError(f"{path} cannot be read ({error}): fetch it again") from None
        if tuple(tensor.shape) != self._shapes[name]:
            raise TrimaranError(
                f"{self.folder}: tensor {name} has shape {tuple(tensor.shape)}, the model's is {self._shapes[name]}: "
                f"its files are not those of its configuration"
            )
        if not tensor.is_floating_point():
            raise TrimaranError(
                f"{self.folder}: tensor {name} is of {str(tensor.dtype).removeprefix('torch.')}, which is no type of "
                f"weights: give the folder from before they were packed"
            )
        return tensor


def write_folder(
    model: Model,
    read: Callable[[str], Tensor],
    folder: Path,
    tokenizer: HuggingFace | None = None,
    family: str | None = None,
) -> None:
    """Write weights that `read` gives by our names as a Hugging Face folder, which is there whole or not at all.

    `tokenizer` is written beside them. `family` is one of theirs that computes the model; None: the first that does.

    Raises TrimaranError where `folder` exists, cannot be written, or no family of theirs computes `model`.
    """
    if folder.exists():
        raise TrimaranError(f"{folder} exists: choose another folder or remove it")
    config = config_from_model(model, family)
    kind = config["model_type"]
    end = None if tokenizer is None else tokenizer.end_of_document
    config |= {"bos_token_id": end, "eos_token_id": end}
    partial = folder.with_name(f".{folder.name}.partial.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        dtype = _write_shards(_converted(model, kind, read), partial)
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
        (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(partial / TOKENIZER_NAME)
            # without it a family's own class reads the vocabulary alone, and cuts text in its own way
            as_it_is = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_name}
            (partial / TOKENIZER_CONFIG_NAME).write_text(json.dumps(as_it_is, indent=2) + "\n")
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise TrimaranError(f"{folder} cannot be written: {reason}; free space or choose another path") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _converted(model: Model, kind: str, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    for ours, entry in entries(model, kind).items():
        for name, tensor in zip(entry.theirs, entry.split(model, read(ours)), strict=True):
            yield name, tensor.contiguous()


def _write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> torch.dtype:
    """Write tensors to files of at most SHARD_BYTES each, and an index where there are several; the first one's dtype,
    which is a matrix: norms beside it may be wider.
    """
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    size = total = 0
    dtypes: list[torch.dtype] = []

    def close() -> None:
        path = folder / f"{len(shards)}.part"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors lets nobody else read it
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        dtypes.append(tensor.dtype)
        bytes_ = tensor.numel() * tensor.element_size()
        if shard and size + bytes_ > SHARD_BYTES:
            close()
            size = 0
        shard[name] = tensor.clone() if tensor._is_view() else tensor
        size += bytes_
        total += bytes_
    close()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / WEIGHTS_NAME)
        return dtypes[0]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for number, name in enumerate(names):
        (folder / f"{number}.part").rename(folder / name)
    weight_map = {tensor: file for file, contained in zip(names, shards, strict=True) for tensor in contained}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return dtypes[0]
