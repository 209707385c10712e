"""Families of 2023 that share keys and values among heads: the fields of a Model that a Hugging Face config states.

Keys and what they are where a config leaves them out: transformers 5.18, models/FAMILY/configuration_FAMILY.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trimaran.files.hugging_face_families import (
    GELUS,
    Config,
    Fields,
    InexpressibleError,
    gpt2_like,
    llama_like,
    one_of,
    refuse_unless,
    rotary,
    with_defaults,
)


def _gpt_bigcode(config: Config) -> Fields:
    """StarCoder: GPT-2, whose heads share one key and value."""
    known = with_defaults(config, activation_function="gelu_pytorch_tanh", multi_query=True)
    return gpt2_like(known) | {"kv_heads": 1 if known["multi_query"] else None}


def _falcon(config: Config) -> Fields:
    """Falcon of three kinds: 40B and 180B have a norm for each side of a layer, 7B one for both, RW one after another.

    modeling_falcon.py, FalconDecoderLayer and FalconAttention.
    """
    config = with_defaults(config, multi_query=True, parallel_attn=True, tie_word_embeddings=True, activation="gelu")
    heads, is_new = config["num_attention_heads"], bool(config.get("new_decoder_architecture"))
    side_by_side = is_new or bool(config["parallel_attn"])
    if side_by_side and (config.get("num_ln_in_parallel_attn", 2) if is_new else 1) == 1:
        key = "num_ln_in_parallel_attn is 1" if is_new else "parallel_attn is True without new_decoder_architecture"
        raise InexpressibleError(f"{key}: one norm for attention and MLP side by side")
    shared = config["multi_query"] and not is_new
    return (rotary(config, {}) if not config.get("alibi") else {"positions": "alibi"}) | {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": heads,
        "kv_heads": 1 if shared else config.get("num_kv_heads", heads),
        "ffn_hidden": config.get("ffn_hidden_size"),
        "max_positions": config.get("max_position_embeddings", 2048),
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "activation": one_of(config, "activation", "gelu", GELUS),
        "bias": bool(config.get("bias")),
        "parallel_residual": side_by_side,
        "tied_embedding": config["tie_word_embeddings"],
    }


def _stablelm(config: Config) -> Fields:
    """Llama with norms of means and biases, which turns a quarter of a head's features."""
    for key in ("use_parallel_residual", "qk_layernorm"):
        refuse_unless(config, key, False)
    config = with_defaults(config, num_key_value_heads=32, max_position_embeddings=4096, partial_rotary_factor=0.25)
    return llama_like(config) | {
        "norm": "layernorm",
        "norm_epsilon": config.get("layer_norm_eps", 1e-5),
        "attention_bias": "qkv" if config.get("use_qkv_bias") else None,
    }


OF_2023: Mapping[str, Callable[[Config], Fields]] = {
    "gpt_bigcode": _gpt_bigcode,
    "falcon": _falcon,
    "stablelm": _stablelm,
}
