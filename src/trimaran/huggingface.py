"""Model from a Hugging Face `config.json` of GPT-2, GPT-NeoX, BLOOM or Llama kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trimaran.model import Model
from trimaran.noun import TrimaranError

Config = Mapping[str, Any]


def _gpt2(config: Config) -> dict[str, Any]:
    return {
        "layers": config["n_layer"],
        "hidden": config["n_embd"],
        "heads": config["n_head"],
        "ffn_hidden": config.get("n_inner"),
        "max_positions": config.get("n_positions", 1024),
    }


def _gpt_neox(config: Config) -> dict[str, Any]:
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "ffn_hidden": config["intermediate_size"],
        "max_positions": config.get("max_position_embeddings", 2048),
        "positions": "rotary",
        "tied_embedding": config.get("tie_word_embeddings", False),
    }


def _bloom(config: Config) -> dict[str, Any]:
    return {
        "layers": config.get("n_layer") or config["num_hidden_layers"],
        "hidden": config.get("hidden_size") or config["n_embed"],
        "heads": config.get("n_head") or config["num_attention_heads"],
        "max_positions": config.get("seq_length", 2048),
        "positions": "alibi",
        "embedding_norm": True,
    }


def _llama(config: Config) -> dict[str, Any]:
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "ffn_hidden": config["intermediate_size"],
        "max_positions": config.get("max_position_embeddings", 2048),
        "positions": "rotary",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "bias": False,
        "tied_embedding": config.get("tie_word_embeddings", False),
    }


_KINDS: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
    "llama": _llama,
}


def model_from_config(config: Config, source: str) -> Model:
    """The Model that a Hugging Face config describes.

    Raises TrimaranError when the kind is unknown or a key is missing; pydantic's
    ValidationError when a value is not possible.
    """
    kind = str(config.get("model_type"))
    if kind not in _KINDS:
        raise TrimaranError(
            f"{source}: model_type {kind!r} is not one of {', '.join(_KINDS)}: write a model TOML instead"
        )
    try:
        fields = _KINDS[kind](config)
        fields["vocab"] = config["vocab_size"]
    except KeyError as error:
        raise TrimaranError(f"{source}: key {error} is missing from a {kind} config: add it") from None
    name = config.get("_name_or_path") or source
    return Model.model_validate({"name": str(name), **fields})
