"""Values of a Hugging Face `config.json` that are no values of their key: told by key, before any family reads them.

A zero or a text in place of a number would else be taken for one that is not stated, and planned as its default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trimaran.nouns.text import quoted

# Whole numbers from 1 on, by every name that a family has for them.
COUNTS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "num_experts",
    "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "shared_expert_intermediate_size", "intermediate_size_mlp", "rotary_dim",
    "n_layer", "n_embd", "n_embed", "n_head", "n_inner", "n_positions", "seq_length",
    "num_kv_heads", "ffn_hidden_size", "num_ln_in_parallel_attn", "moe_num_experts", "moe_k", "moe_layer_interval",
)  # fmt: skip
# Whole numbers of which there may be none.
MAYBE_NONE = (
    "n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers", "q_lora_rank", "sliding_window",
    "max_window_layers", "shared_intermediate_size", "no_rope_layer_interval", "attention_chunk_size",
    "num_local_experts", "moe_num_shared_experts", "moe_layer_start_index",
)  # fmt: skip
# Numbers above 0.
ABOVE_0 = ("rope_theta", "rotary_emb_base", "partial_rotary_factor", "rotary_pct", "query_pre_attn_scalar",
           "routed_scaling_factor", "attention_multiplier", "swiglu_limit", "rope_local_base_freq")  # fmt: skip
YES_OR_NO = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window",
    "use_parallel_residual", "rope_interleave", "use_bias", "qkv_bias", "use_qk_norm", "attention_out_bias",
    "multi_query", "parallel_attn", "new_decoder_architecture", "alibi", "use_qkv_bias",
)  # fmt: skip
LISTS = ("layer_types", "mlp_only_layers", "moe_layers")


def checked_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with whole numbers as such; null stands for what is not stated, as transformers takes it.

    Raises ValueError whose text names the key, its value and what is expected.
    """
    values = dict(config)
    for key in (*COUNTS, *MAYBE_NONE):
        if config.get(key) is not None:
            values[key] = _whole(key, config[key], 1 if key in COUNTS else 0)
    for key in ABOVE_0:
        if config.get(key) is not None and not (_is_number(config[key]) and config[key] > 0):
            raise _wrong(key, config[key], "a number above 0")
    for key in YES_OR_NO:
        if config.get(key) not in (None, True, False):
            raise _wrong(key, config[key], "true or false")
    for key in LISTS:
        if not isinstance(config.get(key), list | None):
            raise _wrong(key, config[key], "a list")
    return values


def _whole(key: str, value: Any, least: int) -> int:
    if _is_number(value) and value == int(value) and value >= least:
        return int(value)
    raise _wrong(key, value, f"a whole number from {least} on")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _wrong(key: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{key} is {quoted(value)}, expected {expected}")
