"""Folders of weights as far as their files tell, read without PyTorch: what is wrong is told before that is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from trimaran.files.catalogue import load_model
from trimaran.files.hugging_face_config import config_from_model
from trimaran.files.user_file import MIB, read_json, regular_file
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.nouns.text import quoted
from trimaran.protocol.files import CHECKPOINTS
from trimaran.train.state.manifest import (
    MANIFEST_NAME,
    DamagedError,
    Manifest,
    folder_name,
    read_manifest,
    saved_steps,
    verify,
)

CONFIG_NAME = "config.json"
WEIGHTS_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
# Lies beside weights: in a checkpoint, in a Hugging Face folder and in a folder of token files.
TOKENIZER_NAME, TOKENIZER_CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
INDEX_BYTES = 64 * MIB
_JOINS_TOKENS = "eh_proj.weight"


@dataclass(frozen=True)
class HuggingFaceFiles:
    """A Hugging Face folder: its model, the model's kind among theirs, and the file that holds each tensor."""

    folder: Path
    model: Model
    kind: str
    file_of: Mapping[str, str]


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint that is whole: its model, and where its tensors lie."""

    folder: Path
    model: Model
    manifest: Manifest


def find_weights(path: Path, alive: Callable[[], None] = lambda: None) -> HuggingFaceFiles | CheckpointFiles:
    """What lies in a checkpoint, in the newest checkpoint in a folder, or in a Hugging Face folder.

    `alive` is called while a checkpoint is compared with its checksums. Raises TrimaranError where there are no
    weights, or what lies there is damaged or of no kind we know.
    """
    if (path / CONFIG_NAME).exists():
        model = load_model(str(path / CONFIG_NAME))
        config = read_json(path / CONFIG_NAME, f"config {path / CONFIG_NAME}", MIB, "fetch it again")
        config = config if isinstance(config, dict) else {}
        kind = str(config.get("model_type"))
        config_from_model(model, kind)  # a model of which its family's config says all
        file_of = _files_of(path)
        _refuse_what_is_left_out(path, config, model, file_of)
        return HuggingFaceFiles(path, model, kind, _without_further_tokens(file_of))
    checkpoint = find_checkpoint(path, alive)
    if checkpoint is None:
        lacks = "has no weights" if path.exists() else "does not exist"
        raise TrimaranError(f"{path} {lacks}: name a checkpoint, a study's folder or a Hugging Face folder")
    try:
        manifest = read_manifest(checkpoint)
        return CheckpointFiles(checkpoint, Model.model_validate(manifest.workload["model"]), manifest)
    except (DamagedError, KeyError) as error:
        raise TrimaranError(f"checkpoint {checkpoint}: {error}") from None
    except ValidationError as error:
        raise TrimaranError(f"checkpoint {checkpoint}: its model is not one: {first_error(error)}") from None


def _refuse_what_is_left_out(folder: Path, config: Mapping[str, Any], model: Model, file_of: Mapping[str, str]) -> None:
    """Raise TrimaranError where a folder holds weights in another form, or more layers than are trained."""
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise TrimaranError(
            f"{folder / CONFIG_NAME}: quantization_config is {quoted(method)}, and weights are read that are not "
            f"quantised: convert them to bf16 and leave quantization_config out"
        )
    # DeepSeek-V3's lie behind its layers, numbered on
    if config.get("num_nextn_predict_layers") and any(f".layers.{model.layers}." in name for name in file_of):
        raise TrimaranError(
            f"{folder} holds layers.{model.layers} beyond its {model.layers} layers: num_nextn_predict_layers is "
            f"{config['num_nextn_predict_layers']}, and multi-token prediction is not trained: set it to 0 in "
            f"{CONFIG_NAME} to leave those weights out"
        )


def _without_further_tokens(file_of: Mapping[str, str]) -> dict[str, str]:
    """The tensors without the layers of multi-token prediction, where the configuration leaves these out.

    Each of them has a matrix that no other layer has (DeepSeek-V3, arXiv 2412.19437, eq. 21), called eh_proj.
    """
    layers = tuple(name.removesuffix(_JOINS_TOKENS) for name in file_of if name.endswith(f".{_JOINS_TOKENS}"))
    return {name: file for name, file in file_of.items() if not (layers and name.startswith(layers))}


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


def _files_of(folder: Path) -> dict[str, str]:
    """The file that holds each tensor, from the index or from the headers of the files."""
    index = folder / INDEX_NAME
    try:
        if index.exists():
            return _indexed(index)
        file_of: dict[str, str] = {}
        # what lies beside it is another form of the same weights, as Mistral's consolidated.safetensors
        alone = folder / WEIGHTS_NAME
        for path in [alone] if alone.exists() else sorted(folder.glob("*.safetensors")):
            with safe_open(regular_file(path, f"weights {path}", None), framework="np") as file:
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
    for name in sorted(set(file_of.values())):
        regular_file(index.with_name(name), f"weights {index.with_name(name)}", None)
    return file_of
