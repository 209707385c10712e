"""Weights from and to Hugging Face folders (config.json and safetensors) of GPT-2, BLOOM and Llama kind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trimaran.files.catalogue import load_model
from trimaran.files.hugging_face_config import config_from_model, kind_of
from trimaran.files.user_file import MIB, read_json, regular_file
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
# Larger models are written as several files, as Hugging Face's libraries do.
SHARD_BYTES = 5 * 10**9
INDEX_BYTES = 64 * MIB


@dataclass(frozen=True)
class Entry:
    """A weight of ours and the tensors of theirs that hold the same numbers.

    `join` makes our weight from their tensors, `split` their tensors from our weight.
    """

    theirs: tuple[str, ...]
    join: Callable[[Model, list[Tensor]], Tensor] = lambda model, parts: parts[0]
    split: Callable[[Model, Tensor], list[Tensor]] = lambda model, ours: [ours]


def _transposed(name: str) -> Entry:
    """GPT-2 keeps matrices as (in, out)."""
    return Entry((name,), lambda model, parts: parts[0].T, lambda model, ours: [ours.T])


def _by_head(parts: list[Tensor], model: Model) -> Tensor:
    """Queries, keys and values of separate matrices (or biases) to (kv heads, queries + 2, head_dim, ..)."""
    per_kv = [part.reshape(model.kv_heads, -1, model.head_dim, *part.shape[1:]) for part in parts]
    return torch.cat(per_kv, dim=1)


def _by_kind(ours: Tensor) -> list[Tensor]:
    """The inverse: all queries, all keys, all values."""
    queries = ours.shape[1] - 2
    return [part.flatten(0, 2) for part in torch.split(ours, [queries, 1, 1], dim=1)]


def _gpt2_qkv(name: str, *, matrix: bool) -> Entry:
    def join(model: Model, parts: list[Tensor]) -> Tensor:
        rows = parts[0].T if matrix else parts[0]
        return _by_head(list(rows.chunk(3)), model)

    def split(model: Model, ours: Tensor) -> list[Tensor]:
        rows = torch.cat(_by_kind(ours))
        return [rows.T if matrix else rows]

    return Entry((name,), join, split)


def _bloom_qkv(name: str) -> Entry:
    return Entry(
        (name,),
        lambda model, parts: parts[0].reshape(model.heads, 3, model.head_dim, *parts[0].shape[1:]),
        lambda model, ours: [ours.flatten(0, 2)],
    )


def _norm(ours: str, theirs: str) -> dict[str, Entry]:
    return {f"{ours}.{part}": Entry((f"{theirs}.{part}",)) for part in ("weight", "bias")}


def _gpt2(model: Model) -> tuple[dict[str, Entry], dict[str, Entry]]:
    outer = {"embedding.tokens": Entry(("wte.weight",)), "embedding.positions": Entry(("wpe.weight",))}
    outer |= _norm("norm", "ln_f")
    layer = _norm("attention_norm", "ln_1") | _norm("mlp_norm", "ln_2")
    layer |= {
        "attention.qkv.weight": _gpt2_qkv("attn.c_attn.weight", matrix=True),
        "attention.qkv.bias": _gpt2_qkv("attn.c_attn.bias", matrix=False),
    }
    for ours, theirs in (("attention.projection", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
        layer |= {f"{ours}.weight": _transposed(f"{theirs}.weight"), f"{ours}.bias": Entry((f"{theirs}.bias",))}
    return outer, layer


def _bloom(model: Model) -> tuple[dict[str, Entry], dict[str, Entry]]:
    outer = {"embedding.tokens": Entry(("word_embeddings.weight",))}
    outer |= _norm("embedding_norm", "word_embeddings_layernorm") | _norm("norm", "ln_f")
    layer = _norm("attention_norm", "input_layernorm") | _norm("mlp_norm", "post_attention_layernorm")
    for part in ("weight", "bias"):
        layer[f"attention.qkv.{part}"] = _bloom_qkv(f"self_attention.query_key_value.{part}")
        layer[f"attention.projection.{part}"] = Entry((f"self_attention.dense.{part}",))
        layer[f"mlp.up.{part}"] = Entry((f"mlp.dense_h_to_4h.{part}",))
        layer[f"mlp.down.{part}"] = Entry((f"mlp.dense_4h_to_h.{part}",))
    return outer, layer


def _llama(model: Model) -> tuple[dict[str, Entry], dict[str, Entry]]:
    outer = {"embedding.tokens": Entry(("embed_tokens.weight",)), "norm.weight": Entry(("norm.weight",))}
    qkv = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
    layer = {
        "attention_norm.weight": Entry(("input_layernorm.weight",)),
        "mlp_norm.weight": Entry(("post_attention_layernorm.weight",)),
        "attention.qkv.weight": Entry(qkv, lambda model, parts: _by_head(parts, model), lambda _, ours: _by_kind(ours)),
        "attention.projection.weight": Entry(("self_attn.o_proj.weight",)),
        "mlp.gate_up.weight": Entry(
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            lambda model, parts: torch.stack(parts),
            lambda model, ours: list(ours),
        ),
        "mlp.down.weight": Entry(("mlp.down_proj.weight",)),
    }
    return outer, layer


_FAMILIES = {
    "gpt2": ("transformer.", "h.", _gpt2),
    "bloom": ("transformer.", "h.", _bloom),
    "llama": ("model.", "layers.", _llama),
}


def entries(model: Model) -> dict[str, Entry]:
    """Every weight of `model` by our name, with their names in full. Raises TrimaranError for a model they lack."""
    prefix, layers, family = _FAMILIES[kind_of(model)]
    outer, layer = family(model)
    by_name = {ours: _prefixed(entry, prefix) for ours, entry in outer.items()}
    for number in range(model.layers):
        by_name |= {
            f"layers.{number}.{ours}": _prefixed(entry, f"{prefix}{layers}{number}.") for ours, entry in layer.items()
        }
    if not model.tied_embedding:
        by_name["head.weight"] = Entry(("lm_head.weight",))
    return by_name


def _prefixed(entry: Entry, prefix: str) -> Entry:
    return Entry(tuple(prefix + name for name in entry.theirs), entry.join, entry.split)


class HuggingFaceWeights:
    """The weights of a Hugging Face folder under our names, each read on request.

    Raises TrimaranError where the folder is not of a kind we know, or lacks a tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = load_model(str(folder / CONFIG_NAME))
        self._entries = entries(self.model)
        self._prefix = _FAMILIES[kind_of(self.model)][0]
        self._file_of = _files_of(folder)

    def read(self, name: str) -> Tensor:
        """The weight `name` of the whole model, as it is stored; vocabulary without padding."""
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
                return tensor
        except (OSError, SafetensorError) as error:
            raise TrimaranError(f"{path} cannot be read ({error}): fetch it again") from None


def _files_of(folder: Path) -> dict[str, str]:
    """The file that holds each tensor, from the index or from the headers of the files."""
    index = folder / INDEX_NAME
    try:
        if index.exists():
            return _indexed(index)
        file_of: dict[str, str] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(regular_file(path, f"weights {path}", None), framework="pt") as file:
                file_of |= dict.fromkeys(file.keys(), path.name)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise TrimaranError(f"{folder}: its safetensors files cannot be read ({error}): fetch them again") from None
    if not file_of:
        raise TrimaranError(f"{folder} holds no *.safetensors: give a folder of {CONFIG_NAME} and safetensors files")
    return file_of


def _indexed(index: Path) -> dict[str, str]:
    """The file that holds each tensor, as an index says. Raises TrimaranError where one lies outside of its folder."""
    content = read_json(index, f"index {index}", INDEX_BYTES, "fetch it again")
    file_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(file_of, dict) or not file_of:
        raise TrimaranError(f"index {index} has no weight_map of tensors and files: fetch it again")
    for tensor, name in file_of.items():
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise TrimaranError(
                f"index {index}: tensor {quoted(tensor)} is said to lie in {quoted(name)}, which is no file of that "
                f"folder: fetch it again from where it was published"
            )
    return file_of


def write_folder(
    model: Model,
    read: Callable[[str], Tensor],
    folder: Path,
    tokenizer: Path | None = None,
    end_of_document: int | None = None,
) -> None:
    """Write weights that `read` gives by our names as a Hugging Face folder, which is there whole or not at all.

    `tokenizer` is a tokenizer.json to put beside them, whose documents end with `end_of_document`.

    Raises TrimaranError where `folder` exists, cannot be written, or no kind of theirs computes `model`.
    """
    if folder.exists():
        raise TrimaranError(f"{folder} exists: choose another folder or remove it")
    config = config_from_model(model) | {"bos_token_id": end_of_document, "eos_token_id": end_of_document}
    partial = folder.with_name(f".{folder.name}.partial.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        dtype = _write_shards(_converted(model, read), partial)
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
        (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial / "tokenizer.json")
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise TrimaranError(f"{folder} cannot be written: {reason}; free space or choose another path") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _converted(model: Model, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    for ours, entry in entries(model).items():
        for name, tensor in zip(entry.theirs, entry.split(model, read(ours)), strict=True):
            yield name, tensor.contiguous()


def _write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> torch.dtype:
    """Write tensors to files of at most SHARD_BYTES each, and an index where there are several; their dtype."""
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    size = total = 0
    dtype = torch.float32

    def close() -> None:
        path = folder / f"{len(shards)}.part"
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors lets nobody else read it
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        dtype, bytes_ = tensor.dtype, tensor.numel() * tensor.element_size()
        if shard and size + bytes_ > SHARD_BYTES:
            close()
            size = 0
        shard[name] = tensor.clone() if tensor._is_view() else tensor
        size += bytes_
        total += bytes_
    close()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return dtype
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for number, name in enumerate(names):
        (folder / f"{number}.part").rename(folder / name)
    weight_map = {tensor: file for file, contained in zip(names, shards, strict=True) for tensor in contained}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return dtype
