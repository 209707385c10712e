"""Configs of Hugging Face's mixtures of experts as they are written, beside those of `hugging_face_written`.

A model without experts is written with the least of them, one of one feature, and read as another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trimaran.files.hugging_face_written import Config, layers_windows, llama_like
from trimaran.nouns.attention import LatentAttention
from trimaran.nouns.model import Model

LEAST_LATENT = LatentAttention(query_rank=0, kv_rank=1, plain_dim=1, rotary_dim=2, value_dim=1)


def _mixtral(model: Model) -> Config:
    return llama_like(model, "MixtralForCausalLM") | {
        "intermediate_size": model.moe_ffn_hidden or 1,
        "num_local_experts": model.experts or 1,
        "num_experts_per_tok": model.top_k or 1,
        "sliding_window": model.sliding_window or None,
    }


def _qwen3_moe(model: Model) -> Config:
    windows = layers_windows(model) | {"use_sliding_window": model.sliding_window > 0}
    return llama_like(model, "Qwen3MoeForCausalLM") | windows | {
        "attention_bias": model.biased_attention == "all",
        "num_experts": model.experts or 1,
        "num_experts_per_tok": model.top_k or 1,
        "moe_intermediate_size": model.moe_ffn_hidden or 1,
        "norm_topk_prob": model.router.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(model.dense_layers)),
    }  # fmt: skip


def _deepseek(model: Model, architecture: str) -> Config:
    """What DeepSeek-V2 and V3 state by the same keys.

    Both have latent attention and experts: a model without is written with the least of them, and read as another.
    """
    latent = model.latent_attention or LEAST_LATENT
    sizes = {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
    }
    config = llama_like(model, architecture) | sizes
    del config["head_dim"]
    return config | {
        "attention_bias": False,
        "n_routed_experts": model.experts or 1,
        "num_experts_per_tok": model.top_k or 1,
        "moe_intermediate_size": model.moe_ffn_hidden or 1,
        "n_shared_experts": model.shared_experts,
        "first_k_dense_replace": model.dense_layers,
        "moe_layer_freq": 1,
        "n_group": model.expert_groups or 1,
        "topk_group": model.top_groups or 1,
        "routed_scaling_factor": model.router.scale,
    }


def _deepseek_v3(model: Model) -> Config:
    return _deepseek(model, "DeepseekV3ForCausalLM") | {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": model.router.normalised,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    }


def _deepseek_v2(model: Model) -> Config:
    method = "group_limited_greedy" if model.expert_groups else "greedy"
    return _deepseek(model, "DeepseekV2ForCausalLM") | {
        "scoring_func": "softmax",
        "topk_method": method,
        "norm_topk_prob": False,
    }


MIXTURES_WRITTEN: Mapping[str, Callable[[Model], Config]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v2": _deepseek_v2,
}
