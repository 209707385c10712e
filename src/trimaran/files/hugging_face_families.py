"""Dense families of Hugging Face models: the fields of a Model that a config of each states.

Keys and what they are where a config leaves them out: transformers 5.18, models/FAMILY/configuration_FAMILY.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trimaran.nouns.attention import magnitude
from trimaran.nouns.model import MOST_LAYERS
from trimaran.nouns.text import quoted

Config = Mapping[str, Any]
Fields = dict[str, Any]

_GELUS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Rotary scalings that a Model names and has no numbers of; "su" is what Phi-3 first called longrope.
_STRETCHES = {"linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "longrope": "longrope", "su": "longrope"}


class InexpressibleError(Exception):
    """A trait that a Model cannot say; the text names the config's key and its value."""


def _one_of(config: Config, key: str, default: str, known: Mapping[str, str]) -> str:
    value = config.get(key) or default
    if not isinstance(value, str) or value not in known:
        raise InexpressibleError(f"{key} {quoted(value)} is not one of {', '.join(known)}")
    return known[value]


def _gpt2(config: Config) -> Fields:
    return {
        "layers": config["n_layer"],
        "hidden": config["n_embd"],
        "heads": config["n_head"],
        "ffn_hidden": config.get("n_inner"),
        "max_positions": config.get("n_positions", 1024),
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "activation": _one_of(config, "activation_function", "gelu_new", _GELUS),
        "tied_embedding": config.get("tie_word_embeddings", True),
    }


def _gpt_neox(config: Config) -> Fields:
    return _rotary(config, {"partial_rotary_factor": config.get("rotary_pct", 0.25)}) | {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "ffn_hidden": config["intermediate_size"],
        "max_positions": config.get("max_position_embeddings", 2048),
        "norm_epsilon": config.get("layer_norm_eps", 1e-5),
        "activation": _one_of(config, "hidden_act", "gelu", _GELUS),
        "attention_bias": None if config.get("attention_bias", True) else "none",
        "parallel_residual": config.get("use_parallel_residual", True),
        "tied_embedding": config.get("tie_word_embeddings", False),
    }


def _bloom(config: Config) -> Fields:
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


def llama_like(config: Config) -> Fields:
    """What Llama and its relatives state by the same keys."""
    attention_bias = "all" if config.get("attention_bias") else None
    if config.get("mlp_bias") and not attention_bias:
        raise InexpressibleError(f"mlp_bias is {quoted(config['mlp_bias'])} without attention_bias")
    return _rotary(config, {}) | {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "ffn_hidden": config["intermediate_size"],
        "max_positions": config.get("max_position_embeddings", 2048),
        "norm": "rmsnorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "mlp": _one_of(config, "hidden_act", "silu", {"silu": "swiglu"}),
        "bias": bool(config.get("mlp_bias")),
        "attention_bias": None if config.get("mlp_bias") else attention_bias,
        "tied_embedding": config.get("tie_word_embeddings", False),
    }


def _mistral(config: Config) -> Fields:
    fields = llama_like({"num_key_value_heads": 8, "max_position_embeddings": 131_072, **config})
    return fields | windows(config, config.get("sliding_window", 4096), lambda layer: True)


def _qwen2(config: Config) -> Fields:
    fields = llama_like({"num_key_value_heads": 32, "max_position_embeddings": 32_768, **config})
    return fields | late_windows(config) | {"attention_bias": "qkv"}


def _qwen3(config: Config) -> Fields:
    defaults = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768}
    return llama_like({**defaults, **config}) | late_windows(config) | {"qk_norm": "head"}


def _olmo2(config: Config) -> Fields:
    return llama_like({"rms_norm_eps": 1e-5, **config}) | {"norm_placement": "after", "qk_norm": "all_heads"}


def _phi3(config: Config) -> Fields:
    fields = llama_like({"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **config})
    return fields | windows(config, config.get("sliding_window"), lambda layer: True)


def _gemma2(config: Config) -> Fields:
    # hidden_act, which its first configs have too, is not read by transformers
    defaults = {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    fields = llama_like({**defaults, **config, "hidden_act": "silu"})
    _one_of(config, "hidden_activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "gelu_tanh"})
    if config.get("use_bidirectional_attention"):
        raise InexpressibleError(f"use_bidirectional_attention is {quoted(config['use_bidirectional_attention'])}")
    return (
        fields
        | windows(config, config.get("sliding_window", 4096), lambda layer: layer % 2 == 0)
        | {
            "mlp": "geglu",
            "activation": "gelu_tanh",
            "norm_placement": "both",
            "query_scale": config.get("query_pre_attn_scalar", 256),
            "attention_softcap": config.get("attn_logit_softcapping", 50.0) or 0.0,
            "logit_softcap": config.get("final_logit_softcapping", 30.0) or 0.0,
            "scaled_embedding": True,
        }
    )


def _rotary(config: Config, defaults: Config) -> Fields:
    """Base of the angles, what they turn and their scaling, as configs before and after transformers 5 state them."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    stated = config.get(field) or {}
    if not isinstance(stated, Mapping):
        raise InexpressibleError(f"{field} is {quoted(stated)}, expected an object such as {{'rope_type': 'llama3'}}")
    known = {**defaults, **config, **stated}
    fields: Fields = {
        "positions": "rotary",
        "rotary_theta": known.get("rope_theta") or known.get("rotary_emb_base") or 10_000.0,
        "rotary_share": known.get("partial_rotary_factor") or 1.0,
    }
    kind = stated.get("rope_type") or stated.get("type") or "default"
    if kind == "llama3":
        scaling = {name: stated[name] for name in ("factor", "low_freq_factor", "high_freq_factor")}
        scaling["original_max_positions"] = stated["original_max_position_embeddings"]
        return fields | {"rotary_scaling": scaling}
    if kind == "default":
        return fields
    if not isinstance(kind, str) or kind not in _STRETCHES:
        raise InexpressibleError(
            f"{field}: rotary scaling {quoted(kind)} is not one of default, llama3, {', '.join(_STRETCHES)}"
        )
    yarn = {"rotary_yarn": _yarn(known)} if kind == "yarn" else {}
    return fields | {"rotary_stretch": _STRETCHES[kind], **yarn}


def _yarn(stated: Config) -> Fields:
    """YaRN's numbers, those that are left out as transformers fills them in (modeling_rope_utils.py).

    Only DeepSeek's attention multiplies its scores besides, as `scored_yarn` says.
    """
    positions = _above_0(stated, "max_position_embeddings", 2048.0)
    original = _above_0(stated, "original_max_position_embeddings", positions)
    factor = max(_above_0(stated, "factor", positions / original), 1.0)
    mscale, all_dim = _above_0(stated, "mscale", 0.0), _above_0(stated, "mscale_all_dim", 0.0)
    usual = magnitude(factor, mscale) / magnitude(factor, all_dim) if mscale and all_dim else magnitude(factor)
    return {
        "factor": factor,
        "original_max_positions": int(original),
        "beta_fast": _above_0(stated, "beta_fast", 32.0),
        "beta_slow": _above_0(stated, "beta_slow", 1.0),
        "attention_factor": _above_0(stated, "attention_factor", usual),
        "truncate": bool(stated.get("truncate", True)),
    }


def _above_0(stated: Config, key: str, default: float) -> float:
    """A number of the config above 0, or the default where it states none."""
    value = stated.get(key)
    if value in (None, 0):
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise InexpressibleError(f"yarn's {key} is {quoted(value)}, expected a number above 0")
    return float(value)


def scored_yarn(config: Config, fields: Fields) -> Fields:
    """Fields whose yarn, if any, multiplies attention's scores as DeepSeek's attention does."""
    if "rotary_yarn" not in fields:
        return fields
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        **fields,
        "rotary_yarn": {**fields["rotary_yarn"], "mscale_all_dim": _above_0(stated, "mscale_all_dim", 0.0)},
    }


def late_windows(config: Config) -> Fields:
    """Qwen's windows: off unless `use_sliding_window`, then of the layers from `max_window_layers` on."""
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise InexpressibleError(f"max_window_layers is {quoted(first)}, expected a number of layers")
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return windows(config, window, lambda layer: layer >= first, f"max_window_layers is {quoted(first)}")


def windows(
    config: Config, window: object, has_window: Callable[[int], bool], stated: str = "sliding_window is set"
) -> Fields:
    """Which layers attend to a window alone: by `layer_types`, or else by the family's own rule (`stated` so).

    Every n-th layer may see the whole sequence.
    """
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    if not window or not isinstance(layers, int) or layers > MOST_LAYERS:
        return {}
    if isinstance(kinds, list):
        unknown = [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]
        if unknown or len(kinds) != layers:
            what = f"holds {quoted(unknown[0])}" if unknown else f"has {len(kinds)} entries for {layers} layers"
            raise InexpressibleError(f"layer_types {what}")
        whole = [number for number, kind in enumerate(kinds, start=1) if kind == "full_attention"]
        stated = "layer_types is set"
    else:
        whole = [layer + 1 for layer in range(layers) if not has_window(layer)]
    if len(whole) == layers:
        return {}
    every = whole[0] if whole else 0
    if every and whole != list(range(every, layers + 1, every)):
        raise InexpressibleError(
            f"{stated}, and {len(whole)} of {layers} layers, the first of them layer {every}, have no sliding window: "
            f"a Model has every n-th such"
        )
    return {"sliding_window": window, "full_attention_every": every}


DENSE: Mapping[str, Callable[[Config], Fields]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
    "llama": llama_like,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "gemma2": _gemma2,
}
