"""Model from a Hugging Face `config.json` of GPT-2, GPT-NeoX, BLOOM or Llama kind, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted

Config = Mapping[str, Any]

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class _InexpressibleError(Exception):
    """Something that a Model cannot say; the text says what."""


def _activation(name: object) -> str:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise _InexpressibleError(f"activation {quoted(name)} is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _gpt2(config: Config) -> dict[str, Any]:
    return {
        "layers": config["n_layer"],
        "hidden": config["n_embd"],
        "heads": config["n_head"],
        "ffn_hidden": config.get("n_inner"),
        "max_positions": config.get("n_positions", 1024),
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "activation": _activation(config.get("activation_function", "gelu_new")),
        "tied_embedding": config.get("tie_word_embeddings", True),
    }


def _gpt_neox(config: Config) -> dict[str, Any]:
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "ffn_hidden": config["intermediate_size"],
        "max_positions": config.get("max_position_embeddings", 2048),
        "positions": "rotary",
        "rotary_theta": _rotary(config)[0],
        "norm_epsilon": config.get("layer_norm_eps", 1e-5),
        "activation": _activation(config.get("hidden_act", "gelu")),
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
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "tied_embedding": config.get("tie_word_embeddings", True),
    }


def _rotary(config: Config) -> tuple[float, dict[str, Any] | None]:
    """Base of the angles and their scaling, as configs before and after transformers 5 state them."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    stated = config.get(field) or {}
    if not isinstance(stated, Mapping):
        raise _InexpressibleError(f"{field} is {quoted(stated)}, expected an object such as {{'rope_type': 'llama3'}}")
    theta = stated.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10_000.0
    kind = stated.get("rope_type") or stated.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise _InexpressibleError(f"rotary scaling {quoted(kind)} is not one of default, llama3")
    scaling = {name: stated[name] for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return theta, scaling | {"original_max_positions": stated["original_max_position_embeddings"]}


def _llama(config: Config) -> dict[str, Any]:
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise _InexpressibleError(f"{name} is true, and a Model has a bias everywhere or nowhere")
    if config.get("hidden_act", "silu") != "silu":
        raise _InexpressibleError(f"hidden_act {quoted(config['hidden_act'])} is not silu")
    theta, scaling = _rotary(config)
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "ffn_hidden": config["intermediate_size"],
        "max_positions": config.get("max_position_embeddings", 2048),
        "positions": "rotary",
        "rotary_theta": theta,
        "rotary_scaling": scaling,
        "norm": "rmsnorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
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
            f"{source}: model_type {quoted(kind)} is not one of {', '.join(_KINDS)}: write a model TOML instead"
        )
    try:
        fields = _KINDS[kind](config)
        fields["vocab"] = config["vocab_size"]
    except KeyError as error:
        raise TrimaranError(f"{source}: key {error} is missing from a {kind} config: add it") from None
    except _InexpressibleError as error:
        raise TrimaranError(f"{source}: {error}: write a model TOML of the nearest shape to plan with") from None
    name = config.get("_name_or_path") or source
    return Model.model_validate({"name": str(name), **fields})


def config_from_model(model: Model) -> dict[str, Any]:
    """The `config.json` of the Hugging Face model that computes what `model` does.

    Raises TrimaranError where there is none among GPT-2, BLOOM and Llama.
    """
    kind = kind_of(model)
    shared = {"vocab_size": model.vocab, "tie_word_embeddings": model.tied_embedding, "model_type": kind}
    if kind == "gpt2":
        return shared | {
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": model.layers,
            "n_embd": model.hidden,
            "n_head": model.heads,
            "n_inner": model.ffn_hidden,
            "n_positions": model.max_positions,
            "layer_norm_epsilon": model.norm_epsilon,
            "activation_function": "gelu_new" if model.activation == "gelu_tanh" else "gelu",
        }
    if kind == "bloom":
        return shared | {
            "architectures": ["BloomForCausalLM"],
            "n_layer": model.layers,
            "hidden_size": model.hidden,
            "n_head": model.heads,
            "seq_length": model.max_positions,
            "layer_norm_epsilon": model.norm_epsilon,
        }
    scaling = None
    if model.rotary_scaling is not None:
        scaling = model.rotary_scaling.model_dump()
        scaling = {"rope_type": "llama3", "original_max_position_embeddings": scaling.pop("original_max_positions")} | (
            scaling
        )
    return shared | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_hidden,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
        "rope_theta": model.rotary_theta,
        "rope_scaling": scaling,
    }


def kind_of(model: Model) -> str:
    """Which of gpt2, bloom and llama computes what `model` does. Raises TrimaranError where none does."""
    plain = {"norm": "layernorm", "mlp": "gelu", "bias": True, "kv_heads": model.heads}
    plain |= {"head_dim": model.hidden // model.heads}
    needs: dict[str, dict[str, Any]] = {
        "gpt2": plain | {"embedding_norm": False},
        "bloom": plain | {"embedding_norm": True, "ffn_hidden": 4 * model.hidden, "activation": "gelu_tanh"},
        "llama": {"norm": "rmsnorm", "mlp": "swiglu", "bias": False, "embedding_norm": False},
    }
    kind = {"learned": "gpt2", "alibi": "bloom", "rotary": "llama"}[model.positions]
    for field, value in ({"head": "vocabulary"} | needs[kind]).items():
        if getattr(model, field) != value:
            raise TrimaranError(
                f"model.{field} is {getattr(model, field)}, Hugging Face's {kind} has {value} "
                f"(positions {model.positions} choose {kind}): there is no such Hugging Face model"
            )
    return kind
