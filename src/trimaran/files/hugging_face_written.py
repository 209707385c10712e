"""Configs of Hugging Face families as they are written: what each states of a Model.

A family computes a model where its config, read as `hugging_face_families` reads it, is that model again: so nothing
of a model is lost on the way, and no other rule says which family takes what. Keys: transformers 5.18,
models/FAMILY/configuration_FAMILY.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trimaran.nouns.model import Model

Config = dict[str, Any]


def _gpt2(model: Model) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn_hidden,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": _gelu(model),
    }


def _gpt_neox(model: Model) -> Config:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn_hidden,
        "max_position_embeddings": model.max_positions,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": _gelu(model),
        "attention_bias": model.biased_attention == "all",
        "use_parallel_residual": model.parallel_residual,
        "rotary_pct": model.rotary_share,
        "rotary_emb_base": model.rotary_theta,
    }


def _bloom(model: Model) -> Config:
    return {
        "architectures": ["BloomForCausalLM"],
        "n_layer": model.layers,
        "hidden_size": model.hidden,
        "n_head": model.heads,
        "seq_length": model.max_positions,
        "layer_norm_epsilon": model.norm_epsilon,
    }


def llama_like(model: Model, architecture: str) -> Config:
    """What Llama and its relatives state by the same keys."""
    scaling = None
    if model.rotary_scaling is not None:
        stated = model.rotary_scaling.model_dump()
        original = stated.pop("original_max_positions")
        scaling = {"rope_type": "llama3", "original_max_position_embeddings": original} | stated
    if model.rotary_yarn is not None:
        stated = model.rotary_yarn.model_dump()
        original = stated.pop("original_max_positions")
        scaling = {"rope_type": "yarn", "original_max_position_embeddings": original} | stated
    return {
        "architectures": [architecture],
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


def _attention_bias(model: Model) -> Config:
    return {"attention_bias": model.biased_attention == "all"}


def _every_layers_window(model: Model) -> Config:
    return {"sliding_window": model.sliding_window or None}


def layers_windows(model: Model) -> Config:
    """Windows of some layers alone, by each layer's kind."""
    kinds = ["sliding_attention" if model.window_of(layer) else "full_attention" for layer in range(model.layers)]
    return {"sliding_window": model.sliding_window or None, "layer_types": kinds}


def _llama(model: Model) -> Config:
    return llama_like(model, "LlamaForCausalLM") | _attention_bias(model) | {"mlp_bias": model.bias}


def _mistral(model: Model) -> Config:
    return llama_like(model, "MistralForCausalLM") | _every_layers_window(model)


def _qwen2(model: Model) -> Config:
    windows = layers_windows(model) | {"use_sliding_window": model.sliding_window > 0}
    return llama_like(model, "Qwen2ForCausalLM") | windows


def _qwen3(model: Model) -> Config:
    windows = layers_windows(model) | {"use_sliding_window": model.sliding_window > 0}
    return llama_like(model, "Qwen3ForCausalLM") | windows | _attention_bias(model)


def _olmo2(model: Model) -> Config:
    return llama_like(model, "Olmo2ForCausalLM") | _attention_bias(model)


def _phi3(model: Model) -> Config:
    # its usual padding token is one that a smaller vocabulary has not
    own = {"partial_rotary_factor": model.rotary_share, "pad_token_id": None}
    return llama_like(model, "Phi3ForCausalLM") | _every_layers_window(model) | own


def _gemma2(model: Model) -> Config:
    scale = model.query_scale or model.head_dim
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scale) if scale == int(scale) else scale,
        "attn_logit_softcapping": model.attention_softcap or None,
        "final_logit_softcapping": model.logit_softcap or None,
        "pad_token_id": None,
    }
    return llama_like(model, "Gemma2ForCausalLM") | layers_windows(model) | _attention_bias(model) | own


def _gelu(model: Model) -> str:
    return "gelu_new" if model.activation == "gelu_tanh" else "gelu"


DENSE_WRITTEN: Mapping[str, Callable[[Model], Config]] = {
    "gpt2": _gpt2,
    "bloom": _bloom,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gpt_neox": _gpt_neox,
}
