"""Families of Hugging Face models that are mixtures of experts: the fields of a Model that a config of each states.

Keys and defaults: transformers 5.18, models/FAMILY/configuration_FAMILY.py; keys that transformers has dropped are
those of the config.json files that the models were published with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trimaran.files.hugging_face_families import (
    Config,
    Fields,
    InexpressibleError,
    glm_like,
    granite_like,
    late_windows,
    llama_like,
    refuse_unless,
    scored_yarn,
    uncounted,
    windows,
    with_defaults,
)
from trimaran.nouns.model import MOST_LAYERS
from trimaran.nouns.text import quoted


def _count(config: Config, key: str) -> int:
    value = config[key]
    if not isinstance(value, int):
        raise InexpressibleError(f"{key} is {quoted(value)}, expected a number")
    return value


def _mixtral(config: Config) -> Fields:
    defaults = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
    fields = llama_like({**defaults, **config})
    return (
        fields
        | windows(config, config.get("sliding_window"), lambda layer: True)
        | {
            "experts": config.get("num_local_experts", 8),
            "top_k": config.get("num_experts_per_tok", 2),
            "moe_ffn_hidden": config["intermediate_size"],
        }
    )


def _without_experts(config: Config) -> Fields:
    """Which layers have a dense MLP: by mlp_only_layers the first ones, by decoder_sparse_step those between others."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not dense:
        return {"experts_every": step}
    refuse_unless(config, "decoder_sparse_step", 1)
    if dense != list(range(len(dense))):
        raise InexpressibleError(f"mlp_only_layers is {quoted(dense)}, and a Model has its dense layers first")
    return {"dense_layers": len(dense)}


def _shared(config: Config, key: str, of_one: str) -> int:
    """Shared experts of the width of a routed one that are as wide as the one that the config states."""
    whole, one = _count(config, key), _count(config, of_one)
    if whole % one:
        raise InexpressibleError(f"{key} is {whole}, not a multiple of {of_one} {one}")
    return whole // one


def _qwen2_moe(config: Config) -> Fields:
    config = with_defaults(
        config, num_key_value_heads=16, max_position_embeddings=32_768, shared_expert_intermediate_size=5632,
        moe_intermediate_size=1408, qkv_bias=True, max_window_layers=28, sliding_window=4096,
    )  # fmt: skip
    window = config["sliding_window"] if config.get("use_sliding_window") else None
    last = config["max_window_layers"]
    return (
        llama_like(config)
        | windows(config, window, lambda layer: layer % 2 == 0 and layer < last)
        | {
            "attention_bias": "qkv" if config["qkv_bias"] else None,
            "experts": config.get("num_experts", 60),
            "top_k": config.get("num_experts_per_tok", 4),
            "moe_ffn_hidden": config["moe_intermediate_size"],
            "shared_experts": _shared(config, "shared_expert_intermediate_size", "moe_intermediate_size"),
            "shared_gate": True,
            "router": {"normalised": bool(config.get("norm_topk_prob"))},
            **_without_experts(config),
        }
    )


def _qwen3_moe(config: Config) -> Fields:
    defaults = {"num_key_value_heads": 4, "max_position_embeddings": 32_768}
    return (
        llama_like({**defaults, **config})
        | late_windows(config)
        | {
            "qk_norm": "head",
            # as published, and as transformers 5 saves it
            "experts": config.get("num_experts", config.get("num_local_experts", 128)),
            "top_k": config.get("num_experts_per_tok", 8),
            "moe_ffn_hidden": config.get("moe_intermediate_size", 768),
            "router": {"normalised": bool(config.get("norm_topk_prob", False))},
            **_without_experts(config),
        }
    )


def _olmoe(config: Config) -> Fields:
    config = with_defaults(config, rms_norm_eps=1e-5, max_position_embeddings=4096)
    return llama_like(config) | {
        "qk_norm": "all_heads",
        "experts": config.get("num_experts", 64),
        "top_k": config.get("num_experts_per_tok", 8),
        "moe_ffn_hidden": config["intermediate_size"],
        "router": {"normalised": bool(config.get("norm_topk_prob"))},
        "uncounted": uncounted(config, clip_qkv=None),
    }


def _granite_moe(config: Config) -> Fields:
    has_shared = bool(config.get("shared_intermediate_size"))
    return granite_like(config) | {
        "experts": config.get("num_local_experts", 8),
        "top_k": config.get("num_experts_per_tok", 2),
        "moe_ffn_hidden": config["intermediate_size"],
        "shared_experts": _shared(config, "shared_intermediate_size", "intermediate_size") if has_shared else 0,
    }


def _granite_hybrid(config: Config) -> Fields:
    """Granite 4 as far as all its layers attend: its MLP is called a shared expert, with routed experts or alone.

    Kinds of layers as published, and as transformers 5 saves them.
    """
    kinds = config.get("layer_types") or ["mamba"]
    if spaces := [kind for kind in kinds if kind not in ("attention", "full_attention")]:
        raise InexpressibleError(f"layer_types has {quoted(spaces[0])}: state-space layers")
    angles = {"position_embedding_type": config.get("position_embedding_type") or "nope"}
    if config.get("num_local_experts", 8):
        fields = _granite_moe(with_defaults(config, shared_intermediate_size=1024))
    else:
        fields = granite_like({**config, "intermediate_size": config.get("shared_intermediate_size", 1024)})
    return fields | {"uncounted": (*fields["uncounted"], *uncounted(angles, position_embedding_type="rope"))}


def _glm4_moe(config: Config) -> Fields:
    config = with_defaults(
        config, num_key_value_heads=8, rms_norm_eps=1e-5, n_shared_experts=1, first_k_dense_replace=1,
        num_experts_per_tok=8, norm_topk_prob=True,
    )  # fmt: skip
    return glm_like(config) | _deepseek_experts(config) | {"qk_norm": "head" if config.get("use_qk_norm") else "none"}


def _dots1(config: Config) -> Fields:
    config = with_defaults(
        config, num_key_value_heads=32, norm_topk_prob=False, n_shared_experts=0, max_window_layers=62
    )
    first = config["max_window_layers"]
    return (
        llama_like(config)
        | windows(config, config.get("sliding_window"), lambda layer: layer >= first)
        | _deepseek_experts(config)
        | {"qk_norm": "head"}
    )


def _minimax_m2(config: Config) -> Fields:
    config = with_defaults(config, num_key_value_heads=8, head_dim=128, max_position_embeddings=196_608, rope_theta=5e6)
    if turned := config.get("rotary_dim"):
        config["partial_rotary_factor"] = turned / config["head_dim"]
    return llama_like(config) | {
        "qk_norm": "all_heads",
        "experts": config.get("num_local_experts", 256),
        "top_k": config.get("num_experts_per_tok", 8),
        "moe_ffn_hidden": config["intermediate_size"],
        "router": {"scores": "sigmoid", "bias": True},
    }


def _ernie4_5_moe(config: Config) -> Fields:
    """ERNIE 4.5's mixtures choose by a softmax and a bias; with `use_bias` the output matrix would have one too."""
    refuse_unless(config, "use_bias", False)
    config = with_defaults(
        config, num_key_value_heads=4, max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=500_000.0,
        tie_word_embeddings=True, moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, moe_num_shared_experts=2,
        moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1,
    )  # fmt: skip
    return llama_like({**config, "attention_bias": False, "mlp_bias": False}) | {
        "experts": config["moe_num_experts"],
        "top_k": config["moe_k"],
        "moe_ffn_hidden": config["moe_intermediate_size"],
        "shared_experts": config["moe_num_shared_experts"],
        "router": {"bias": True},
        "mtp_depth": config.get("num_nextn_predict_layers") or 0,
        **_between(config),
    }


def _between(config: Config) -> Fields:
    """Which of ERNIE's layers have a dense MLP: the first ones, or those between others."""
    first, last, every = (_count(config, f"moe_layer_{name}") for name in ("start_index", "end_index", "interval"))
    layers = min(_count(config, "num_hidden_layers"), MOST_LAYERS)
    end = layers if last == -1 else last + 1
    mixtures = [layer for layer in range(layers) if (layer + 1) % every == 0 and first <= layer < end]
    if every == 1 and mixtures == list(range(first, layers)):
        return {"dense_layers": first}
    if mixtures == list(range(every - 1, layers, every)):
        return {"experts_every": every}
    raise InexpressibleError(
        f"moe_layer_start_index {first}, moe_layer_end_index {last} and moe_layer_interval {every} leave "
        f"{len(mixtures)} of {layers} layers with experts, and a Model has them behind dense ones, or every n-th"
    )


def _llama4(config: Config) -> Fields:
    config = with_defaults(
        config, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=500_000.0, use_qk_norm=True,
        max_position_embeddings=131_072, intermediate_size_mlp=16_384, attention_chunk_size=8192,
        no_rope_layer_interval=4, attn_temperature_tuning=True, interleave_moe_layer_step=1,
    )  # fmt: skip
    step = _count(config, "interleave_moe_layer_step")
    layers = min(_count(config, "num_hidden_layers"), MOST_LAYERS)
    turns = list(range(step - 1, layers, max(step, 1)))
    if (mixtures := config.get("moe_layers")) and mixtures != turns:
        raise InexpressibleError(
            f"moe_layers is {quoted(mixtures)}, not every {step} layers as interleave_moe_layer_step says"
        )
    besides = uncounted(
        config, attention_chunk_size=None, use_qk_norm=False, no_rope_layer_interval=0, attn_temperature_tuning=False
    )
    return llama_like({**config, "intermediate_size": config["intermediate_size_mlp"]}) | {
        "experts": config.get("num_local_experts", 16),
        "top_k": config.get("num_experts_per_tok", 1),
        "moe_ffn_hidden": config["intermediate_size"],
        "shared_experts": 1,
        "experts_every": step,
        "router": {"scores": "sigmoid", "normalised": False},
        "uncounted": besides,
    }


def _gpt_oss(config: Config) -> Fields:
    refuse_unless(config, "attention_bias", True)
    defaults = {"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
    fields = llama_like({**defaults, **config, "attention_bias": False})
    return (
        fields
        | windows(config, config.get("sliding_window", 128), lambda layer: layer % 2 == 0)
        | {
            "bias": True,
            "attention_sinks": True,
            "swiglu_limit": config.get("swiglu_limit", 7.0),
            "experts": config.get("num_local_experts", 128),
            "top_k": config.get("num_experts_per_tok", 4),
            "moe_ffn_hidden": config["intermediate_size"],
        }
    )


def _deepseek(config: Config) -> Fields:
    """DeepSeek-V2 and V3, whose configs name every rank and width; Kimi K2 is of V3's kind."""
    # transformers' V2 scales weights alone, whatever norm_topk_prob says
    of_v2 = (("norm_topk_prob", False),) if config.get("model_type") == "deepseek_v2" else ()
    usual = (
        ("moe_layer_freq", 1), ("attention_bias", False), ("mlp_bias", False), ("rope_interleave", True),
        ("use_mla", True),
    )  # fmt: skip
    for key, value in (*usual, *of_v2):
        refuse_unless(config, key, value)
    # transformers scores by the family, whatever these two say
    is_v2 = config.get("model_type") == "deepseek_v2"
    refuse_unless(config, "scoring_func", "softmax" if is_v2 else "sigmoid")
    refuse_unless(config, "topk_method", *(("group_limited_greedy", "greedy") if is_v2 else ("noaux_tc",)))
    latent = {
        "query_rank": config["q_lora_rank"] or 0,
        "kv_rank": config["kv_lora_rank"],
        "plain_dim": config["qk_nope_head_dim"],
        "rotary_dim": config["qk_rope_head_dim"],
        "value_dim": config["v_head_dim"],
    }
    fields = scored_yarn(config, llama_like({**config, "num_key_value_heads": None}))
    head_dim = sum(_count(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    return fields | {"head_dim": head_dim, "latent_attention": latent} | _deepseek_experts(config)


def _deepseek_experts(config: Config) -> Fields:
    """Experts as DeepSeek's configs state them, and GLM's since 4.5."""
    return _groups(config) | {
        "router": _deepseek_router(config),
        "experts": config["n_routed_experts"],
        "top_k": config["num_experts_per_tok"],
        "moe_ffn_hidden": config["moe_intermediate_size"],
        "shared_experts": config.get("n_shared_experts") or 0,
        "dense_layers": config.get("first_k_dense_replace") or 0,
        "mtp_depth": config.get("num_nextn_predict_layers") or 0,
    }


def _groups(config: Config) -> Fields:
    """Groups that a token's experts come from; a router that chooses of all groups, or greedily, knows none."""
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if config.get("topk_method") == "greedy" or groups == chosen:
        return {}
    return {"expert_groups": groups, "top_groups": chosen}


def _deepseek_router(config: Config) -> Fields:
    """V3 scores by a sigmoid, chooses with a bias and sums a group's two best; V2 takes a group by its best."""
    is_v3 = config.get("model_type") != "deepseek_v2"
    return {
        "scores": "sigmoid" if is_v3 else "softmax",
        "normalised": bool(config.get("norm_topk_prob", is_v3)),
        "scale": config.get("routed_scaling_factor", 1.0),
        "group_best": 2 if is_v3 else 1,
        "bias": is_v3,
    }


MIXTURES: Mapping[str, Callable[[Config], Fields]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "granitemoe": _granite_moe,
    "granitemoeshared": _granite_moe,
    "granitemoehybrid": _granite_hybrid,
    "glm4_moe": _glm4_moe,
    "dots1": _dots1,
    "minimax_m2": _minimax_m2,
    "ernie4_5_moe": _ernie4_5_moe,
    "llama4_text": _llama4,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
}
