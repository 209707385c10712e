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

GELUS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Rotary scalings that a Model names and has no numbers of; "su" is what Phi-3 first called longrope.
_STRETCHES = {"linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "longrope": "longrope", "su": "longrope"}


class InexpressibleError(Exception):
    """A trait that a Model cannot say; the text names the config's key and its value."""


def one_of(config: Config, key: str, default: str, known: Mapping[str, str]) -> str:
    """What the word of a key stands for, one of `known`; raises InexpressibleError for any other."""
    value = config.get(key) or default
    if not isinstance(value, str) or value not in known:
        raise InexpressibleError(f"{key} {quoted(value)} is not one of {', '.join(known)}")
    return known[value]


def refuse_unless(config: Config, key: str, *usual: object) -> None:
    """Refuse a key that makes another model unless it is absent or as all published models have it."""
    if config.get(key) not in (None, *usual):
        raise InexpressibleError(f"{key} is {quoted(config[key])}, not {quoted(usual[0])}")


def uncounted(config: Config, **usual: object) -> tuple[str, ...]:
    """What a config states by these keys and no Model has a field for, where it is not as usual: `key value`."""
    return tuple(f"{key} {quoted(config[key])}" for key, value in usual.items() if config.get(key) not in (None, value))


def with_defaults(config: Config, **defaults: object) -> dict[str, Any]:
    """The config with a family's defaults for what it leaves out or states as null."""
    return {**defaults, **{key: value for key, value in config.items() if value is not None}}


def gpt2_like(config: Config) -> Fields:
    """What GPT-2 and StarCoder state by the same keys."""
    return {
        "layers": config["n_layer"],
        "hidden": config["n_embd"],
        "heads": config["n_head"],
        "ffn_hidden": config.get("n_inner"),
        "max_positions": config.get("n_positions", 1024),
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "activation": one_of(config, "activation_function", "gelu_new", GELUS),
        "tied_embedding": config.get("tie_word_embeddings", True),
    }


def _gpt_neox(config: Config) -> Fields:
    return rotary(config, {"partial_rotary_factor": config.get("rotary_pct", 0.25)}) | {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "ffn_hidden": config["intermediate_size"],
        "max_positions": config.get("max_position_embeddings", 2048),
        "norm_epsilon": config.get("layer_norm_eps", 1e-5),
        "activation": one_of(config, "hidden_act", "gelu", GELUS),
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
    attention_bias = "all" if config.get("attention_bias") else "none"
    is_alike = bool(config.get("mlp_bias")) == (attention_bias == "all")
    return rotary(config, {}) | {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "ffn_hidden": config["intermediate_size"],
        "max_positions": config.get("max_position_embeddings", 2048),
        "norm": "rmsnorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "mlp": one_of(config, "hidden_act", "silu", {"silu": "swiglu"}),
        "bias": bool(config.get("mlp_bias")),
        "attention_bias": None if is_alike else attention_bias,
        "tied_embedding": config.get("tie_word_embeddings", False),
    }


def _mistral(config: Config) -> Fields:
    fields = llama_like({"num_key_value_heads": 8, "max_position_embeddings": 131_072, **config})
    return fields | windows(config, config.get("sliding_window", 4096), lambda layer: True)


def _ministral3(config: Config) -> Fields:
    scaled = uncounted(config.get("rope_parameters") or {}, llama_4_scaling_beta=0)
    return _mistral({"sliding_window": None, "head_dim": 128, **config}) | {"uncounted": scaled}


def _qwen2(config: Config) -> Fields:
    fields = llama_like({"num_key_value_heads": 32, "max_position_embeddings": 32_768, **config})
    return fields | late_windows(config) | {"attention_bias": "qkv"}


def _qwen3(config: Config) -> Fields:
    defaults = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768}
    return llama_like({**defaults, **config}) | late_windows(config) | {"qk_norm": "head"}


def _olmo2(config: Config) -> Fields:
    return llama_like({"rms_norm_eps": 1e-5, **config}) | {"norm_placement": "after", "qk_norm": "all_heads"}


def _olmo3(config: Config) -> Fields:
    config = of_whole_layers(config, sliding_window=4096, rope_theta=500_000.0)
    return _olmo2(config) | windows(config, config["sliding_window"], lambda layer: (layer + 1) % 4 != 0)


def _cwm(config: Config) -> Fields:
    """Llama of which the first of each four layers has no window; a Model has the last so, which costs as much."""
    config = with_defaults(
        config, num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072, rms_norm_eps=1e-5,
        sliding_window=8192, rope_theta=1e6,
    )  # fmt: skip
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config["rope_scaling"] = {
            "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    kinds = config.get("layer_types")
    backwards = {**config, "layer_types": kinds[::-1] if isinstance(kinds, list) else None}
    window = windows(backwards, config["sliding_window"], lambda layer: (layer + 1) % 4 != 0)
    every = window.get("full_attention_every", 0)
    first = f"of each {every} layers the first without a window, counted as the last"
    return llama_like(config) | window | {"uncounted": (first,) if every > 1 else ()}


def _starcoder2(config: Config) -> Fields:
    config = with_defaults(config, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True)
    fields = llama_like({**config, "hidden_act": "silu"})
    return (
        fields
        | windows(config, config.get("sliding_window"), lambda layer: True)
        | {
            "norm": "layernorm",
            "norm_epsilon": config.get("norm_epsilon", 1e-5),
            "mlp": "gelu",
            "activation": one_of(config, "hidden_act", "gelu_pytorch_tanh", GELUS),
            "bias": config.get("use_bias", True),
        }
    )


def _arcee(config: Config) -> Fields:
    config = with_defaults(config, max_position_embeddings=4096, rms_norm_eps=1e-5)
    squared = {"mlp": one_of(config, "hidden_act", "relu2", {"relu2": "relu2"})}
    return llama_like({**config, "hidden_act": "silu"}) | squared


def _nemotron(config: Config) -> Fields:
    fields = _arcee(with_defaults(config, partial_rotary_factor=0.5))
    return fields | {"norm": "layernorm", "norm_epsilon": config.get("norm_eps", 1e-5)}


def _jais2(config: Config) -> Fields:
    config = with_defaults(config, attention_bias=True, mlp_bias=True, max_position_embeddings=8192)
    return _arcee(config) | {"norm": "layernorm", "norm_epsilon": config.get("layer_norm_eps", 1e-5)}


def _helium(config: Config) -> Fields:
    config = with_defaults(
        config, num_key_value_heads=20, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-8, rope_theta=1e5
    )
    fields = llama_like({**config, "attention_bias": False})
    return fields | ({"attention_bias": "qkv"} if config.get("attention_bias") else {})


def _hunyuan(config: Config) -> Fields:
    """Llama whose queries and keys are normalised behind their angles, where others do so ahead of them."""
    fields = llama_like({**with_defaults(config, rms_norm_eps=1e-5), "mlp_bias": False})
    return fields | {"qk_norm": "head", "uncounted": ("query_layernorm behind the rotary angles",)}


def _exaone4(config: Config) -> Fields:
    """Norms of what attention and MLP give; beside layers with windows, those without turn no feature."""
    window, kinds = config.get("sliding_window", 4096), config.get("layer_types")
    every = 1 if kinds or not window else layers_of({"sliding_window_pattern": 4, **config}, "sliding_window_pattern")
    known = with_defaults(config, num_key_value_heads=32, rms_norm_eps=1e-5)
    fields = llama_like({**known, "attention_bias": False, "mlp_bias": False})
    return (
        fields
        | windows(config, window, lambda layer: (layer + 1) % every != 0, "sliding_window_pattern is set")
        | {"norm_placement": "after", "qk_norm": "head"}
        | {"uncounted": (f"sliding_window {quoted(window)}: layers without it have no angles",) if window else ()}
    )


def layers_of(config: Config, key: str) -> int:
    """A number of layers from 1 on, that a config states by a key."""
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InexpressibleError(f"{key} is {quoted(value)}, expected a number of layers")
    return value


def granite_like(config: Config) -> Fields:
    """Llama with multipliers of which a Model has the one of attention's scores alone."""
    multiplier = config.get("attention_multiplier") or 1.0
    return llama_like(config) | {
        "query_scale": 1.0 / (multiplier * multiplier),
        "uncounted": uncounted(config, embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0),
    }


def glm_like(config: Config, **defaults: object) -> Fields:
    """What GLM's dense models and mixtures state by the same keys: they turn half of a head's features."""
    config = with_defaults(config, partial_rotary_factor=0.5, max_position_embeddings=131_072, **defaults)
    has_bias = config.get("attention_bias")
    return llama_like({**config, "attention_bias": False}) | {"attention_bias": "qkv" if has_bias else None}


def _glm(config: Config) -> Fields:
    return glm_like(config, num_key_value_heads=2, head_dim=128, attention_bias=True, rms_norm_eps=1.5625e-7)


def _glm4(config: Config) -> Fields:
    return _glm(config) | {"norm_placement": "both"}


def _glm4v(config: Config) -> Fields:
    """GLM-4V's decoder, whose attention asks for no size of heads and no bias (modeling_glm4v.py, line 559)."""
    return _glm4(config) | {"head_dim": None, "attention_bias": "qkv"}


def _smollm3(config: Config) -> Fields:
    config = with_defaults(
        config, num_key_value_heads=4, max_position_embeddings=32_768, rope_theta=2e6, tie_word_embeddings=True,
        no_rope_layer_interval=4,
    )  # fmt: skip
    refuse_unless(config, "use_sliding_window", False)
    return llama_like(config) | {"uncounted": uncounted(config, no_rope_layer_interval=0)}


def _seed_oss(config: Config) -> Fields:
    config = with_defaults(
        config, num_key_value_heads=8, head_dim=128, attention_bias=True, max_position_embeddings=524_288
    )
    biases = "all" if config.get("attention_out_bias") else "qkv"
    if biases == "all" and not config["attention_bias"]:
        raise InexpressibleError("attention_out_bias is True without attention_bias")
    fields = llama_like({**config, "attention_bias": False})
    return fields | ({"attention_bias": biases} if config["attention_bias"] else {})


def _ernie4_5(config: Config) -> Fields:
    config = with_defaults(
        config, num_key_value_heads=2, head_dim=128, max_position_embeddings=131_072, rms_norm_eps=1e-5,
        rope_theta=500_000.0, tie_word_embeddings=True,
    )  # fmt: skip
    return llama_like(config) | {"bias": bool(config.get("use_bias"))}


def _phi3(config: Config) -> Fields:
    fields = llama_like({"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **config})
    return fields | windows(config, config.get("sliding_window"), lambda layer: True)


def of_whole_layers(config: Config, **defaults: object) -> dict[str, Any]:
    """The config with the angles of layers that see the whole sequence, where layers with windows have their own."""
    config = with_defaults(config, **defaults)
    angles = config.get("rope_parameters")
    if isinstance(angles, Mapping) and isinstance(whole := angles.get("full_attention"), Mapping):
        config["rope_parameters"] = whole
    return config


def rotary(config: Config, defaults: Config) -> Fields:
    """Base of the angles, what they turn and their scaling, as configs before and after transformers 5 state them."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    angles = config.get(field) or {}
    if not isinstance(angles, Mapping):
        raise InexpressibleError(f"{field} is {quoted(angles)}, expected an object such as {{'rope_type': 'llama3'}}")
    known = {**defaults, **config, **angles}
    fields: Fields = {
        "positions": "rotary",
        "rotary_theta": known.get("rope_theta") or known.get("rotary_emb_base") or 10_000.0,
        "rotary_share": known.get("partial_rotary_factor") or 1.0,
    }
    kind = angles.get("rope_type") or angles.get("type") or "default"
    if kind == "llama3":
        scaling = {name: angles[name] for name in ("factor", "low_freq_factor", "high_freq_factor")}
        scaling["original_max_positions"] = angles["original_max_position_embeddings"]
        return fields | {"rotary_scaling": scaling}
    if kind in ("default", "mrope"):  # of three positions a token, equal in text
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
    "gpt2": gpt2_like,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
    "llama": llama_like,
    "mistral": _mistral,
    "ministral": _mistral,
    "ministral3": _ministral3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "phi3": _phi3,
    "starcoder2": _starcoder2,
    "granite": granite_like,
    "glm": _glm,
    "glm4": _glm4,
    "glm4v_text": _glm4v,
    "smollm3": _smollm3,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie4_5,
    "arcee": _arcee,
    "nemotron": _nemotron,
    "exaone4": _exaone4,
    "helium": _helium,
    "hunyuan_v1_dense": _hunyuan,
    "jais2": _jais2,
    "cwm": _cwm,
}
