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
    late_windows,
    llama_like,
    scored_yarn,
    windows,
)
from trimaran.nouns.text import quoted


def _refuse_unless(config: Config, key: str, *usual: object) -> None:
    """Refuse a key that makes another model unless it is absent or as all published models have it."""
    if config.get(key) not in (None, *usual):
        raise InexpressibleError(f"{key} is {quoted(config[key])}, not {quoted(usual[0])}")


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


def _qwen3_moe(config: Config) -> Fields:
    _refuse_unless(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        raise InexpressibleError(f"mlp_only_layers is {quoted(dense)}, and a Model has its dense layers first")
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
            "dense_layers": len(dense),
            "router": {"normalised": bool(config.get("norm_topk_prob", False))},
        }
    )


def _gpt_oss(config: Config) -> Fields:
    _refuse_unless(config, "attention_bias", True)
    defaults = {"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
    fields = llama_like({**defaults, **config, "attention_bias": False})
    return (
        fields
        | windows(config, config.get("sliding_window", 128), lambda layer: layer % 2 == 0)
        | {
            "bias": True,
            "attention_sinks": True,
            "experts": config.get("num_local_experts", 128),
            "top_k": config.get("num_experts_per_tok", 4),
            "moe_ffn_hidden": config["intermediate_size"],
        }
    )


def _deepseek(config: Config) -> Fields:
    """DeepSeek-V2 and V3, whose configs name every rank and width; Kimi K2 is of V3's kind."""
    # transformers' V2 scales weights alone, whatever norm_topk_prob says
    of_v2 = (("norm_topk_prob", False),) if config.get("model_type") == "deepseek_v2" else ()
    usual = (("moe_layer_freq", 1), ("attention_bias", False), ("mlp_bias", False), ("rope_interleave", True))
    for key, value in (*usual, *of_v2):
        _refuse_unless(config, key, value)
    # transformers scores by the family, whatever these two say
    is_v2 = config.get("model_type") == "deepseek_v2"
    _refuse_unless(config, "scoring_func", "softmax" if is_v2 else "sigmoid")
    _refuse_unless(config, "topk_method", *(("group_limited_greedy", "greedy") if is_v2 else ("noaux_tc",)))
    latent = {
        "query_rank": config["q_lora_rank"] or 0,
        "kv_rank": config["kv_lora_rank"],
        "plain_dim": config["qk_nope_head_dim"],
        "rotary_dim": config["qk_rope_head_dim"],
        "value_dim": config["v_head_dim"],
    }
    fields = scored_yarn(config, llama_like({**config, "num_key_value_heads": None})) | _groups(config)
    return fields | {
        "router": _deepseek_router(config),
        "head_dim": sum(_count(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")),
        "latent_attention": latent,
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
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
}
