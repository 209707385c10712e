"""Model from a Hugging Face `config.json`, and back."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from trimaran.files.hugging_face_families import DENSE, Config, InexpressibleError
from trimaran.files.hugging_face_gemma import GEMMAS
from trimaran.files.hugging_face_mixtures import MIXTURES
from trimaran.files.hugging_face_of_2023 import OF_2023
from trimaran.files.hugging_face_values import checked_values
from trimaran.files.hugging_face_written import DENSE_WRITTEN
from trimaran.files.hugging_face_written_mixtures import MIXTURES_WRITTEN
from trimaran.files.same_model import differing_fields
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted

MOST_NAMED = 5
FAMILIES = {**DENSE, **OF_2023, **GEMMAS, **MIXTURES}
# Families that are a decoder of text, of the family that stands here, beside one of images.
_OF_IMAGES = {"gemma3": "gemma3_text", "mistral3": "mistral", "llama4": "llama4_text"}
# The sections that hold such a decoder, and decoders that compute what a family of text alone does. The first two have
# no section of their own as they were published.
_SECTIONS = ("text_config", "llm_config", "language_config")
_DECODERS = {
    "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "glm4v_moe_text": "glm4_moe",
}  # fmt: skip
# Families of today that no Model can say, and what they have that none has.
_ONE_NORM = "one norm for attention and MLP side by side"
_STATE_SPACES = "state-space layers"
_INDEXER = "attention to tokens that an indexer chooses"
_LINEAR = "linear attention in three of four layers"
_INEXPRESSIBLE = {
    "qwen3_next": _LINEAR, "qwen3_5_text": _LINEAR, "qwen3_5_moe_text": _LINEAR,
    "minimax": "linear attention", "kimi_linear": "linear attention", "lfm2": "convolutions in place of attention",
    "deepseek_v32": _INDEXER, "glm_moe_dsa": _INDEXER,
    "cohere": _ONE_NORM, "cohere2": _ONE_NORM, "phi": _ONE_NORM, "gptj": _ONE_NORM,
    "codegen": _ONE_NORM,
    "phimoe": "a bias of its output matrix", "olmo": "norms without weights",
    "opt": "an MLP of ReLU", "gemma3n_text": "embeddings of each layer's own",
    "gemma4_text": "heads of another size in layers that see the whole sequence", "jamba": _STATE_SPACES,
    "mamba2": _STATE_SPACES, "nemotron_h": _STATE_SPACES, "falcon_h1": _STATE_SPACES,
}  # fmt: skip
# Families whose weights are read and written. Where several compute the same model, the first is written.
WRITTEN = {**DENSE_WRITTEN, **MIXTURES_WRITTEN}


def model_from_config(config: Config, source: str) -> Model:
    """The Model that a Hugging Face config describes.

    Raises TrimaranError when the kind is unknown or a key is missing; pydantic's
    ValidationError when a value is not possible.
    """
    name = config.get("_name_or_path") or source
    config, beside = _decoder_of(config)
    kind = str(config.get("model_type"))
    if kind in _INEXPRESSIBLE:
        raise TrimaranError(
            f"{source}: {kind} has {_INEXPRESSIBLE[kind]}: no model here has that; plan with the nearest"
        )
    if kind not in FAMILIES:
        raise TrimaranError(
            f"{source}: model_type {quoted(kind)} is not among the {len(FAMILIES)} that are known{_like(kind)}: if its "
            f"layers are those of one of them, as of llama, name that one"
        )
    try:
        config = checked_values(config)
    except ValueError as error:
        raise TrimaranError(f"{source}: {error}") from None
    try:
        fields = FAMILIES[kind](config)
        fields.setdefault("vocab", config.get("vocab_size"))
        if fields["vocab"] is None:
            raise KeyError("vocab_size")
    except KeyError as error:
        raise TrimaranError(f"{source}: key {error} is missing from a {kind} config: add it") from None
    except InexpressibleError as error:
        raise TrimaranError(f"{source}: {error}: no model here has that; plan with the nearest") from None
    fields["uncounted"] = (*fields.get("uncounted", ()), *beside)
    return Model.model_validate({"name": str(name), **fields})


def _like(kind: str) -> str:
    """Of the families, those whose names are like the given one: all of them would fill a screen."""
    close = difflib.get_close_matches(kind, FAMILIES, n=MOST_NAMED)
    return f", of which those like it are {', '.join(close)}" if close else ""


def _decoder_of(config: Config) -> tuple[Config, tuple[str, ...]]:
    """The config of the text's decoder where a model reads images too, and what of the model that leaves out."""
    kind = str(config.get("model_type"))
    if kind in FAMILIES:
        return config, ()
    inner = next((part for key in _SECTIONS if isinstance(part := config.get(key), Mapping)), {})
    tied = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    text = {"model_type": _OF_IMAGES.get(kind, kind), **inner, **tied} if inner else dict(config)
    text["model_type"] = _DECODERS.get(str(text.get("model_type")), text.get("model_type"))
    beside = tuple(f"{key} of {kind}" for key in ("vision_config", "audio_config") if config.get(key))
    return text, beside


def config_from_model(model: Model, family: str | None = None) -> dict[str, Any]:
    """The `config.json` of the Hugging Face model that computes what `model` does: of `family`, or of the first such.

    Raises TrimaranError where there is none among the families whose weights are written.
    """
    if family is not None and family not in WRITTEN:
        raise TrimaranError(
            f"weights of Hugging Face's family {quoted(family)} cannot be read or written: those of "
            f"{', '.join(WRITTEN)} can"
        )
    apart = {}
    for kind in [family] if family is not None else WRITTEN:
        config = WRITTEN[kind](model)
        config |= {"vocab_size": model.vocab, "tie_word_embeddings": model.tied_embedding, "model_type": kind}
        apart[kind] = _differing(model, config)
        if not apart[kind]:
            return config
    kind, nearest = min(apart.items(), key=lambda found: ("positions" in found[1], len(found[1])))
    field, (ours, theirs) = next(iter(nearest.items()))
    nearer = "" if family is not None else ", and no other family of theirs comes nearer"
    raise TrimaranError(
        f"model.{field} is {ours}, Hugging Face's {kind} has {theirs}{nearer}: weights of such a model cannot be read "
        f"or written"
    )


def _differing(model: Model, config: dict[str, Any]) -> Mapping[str, tuple[object, object]]:
    """The fields in which a model differs from the one that a config describes."""
    try:
        return differing_fields(model, model_from_config(config, "config.json"))
    except ValidationError:  # of a family that has no head size of its own, where heads do not divide hidden
        return {"head_dim": (model.head_dim, "hidden / heads")}
