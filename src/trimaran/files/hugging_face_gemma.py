"""Gemma of three generations: the fields of a Model that a Hugging Face config of each states.

Keys and what they are where a config leaves them out: transformers 5.18, models/gemma*/configuration_gemma*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trimaran.files.hugging_face_families import (
    Config,
    Fields,
    layers_of,
    llama_like,
    of_whole_layers,
    one_of,
    refuse_unless,
    uncounted,
    windows,
    with_defaults,
)

_GELU = {"gelu_pytorch_tanh": "gelu_tanh"}
# The first configs call it so, which transformers computes by tanh (configuration_gemma.py, __post_init__).
_EITHER = _GELU | {"gelu": "gelu_tanh"}


def _gemma(config: Config) -> Fields:
    known = with_defaults(
        config, num_key_value_heads=16, head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True
    )
    known.setdefault("hidden_activation", known.get("hidden_act"))
    return _gemma_like(known, _EITHER)


def _gemma2(config: Config) -> Fields:
    known = with_defaults(
        config, num_key_value_heads=4, head_dim=256, max_position_embeddings=8192, query_pre_attn_scalar=256,
        tie_word_embeddings=True,
    )  # fmt: skip
    return (
        _gemma_like(known, _GELU)
        | windows(config, config.get("sliding_window", 4096), lambda layer: layer % 2 == 0)
        | {
            "norm_placement": "both",
            "query_scale": known["query_pre_attn_scalar"],
            # null is no cap
            "attention_softcap": config.get("attn_logit_softcapping", 50.0) or 0.0,
            "logit_softcap": config.get("final_logit_softcapping", 30.0) or 0.0,
        }
    )


def _gemma3(config: Config) -> Fields:
    """Five layers of six have a window, and angles of a base of their own, which no Model tells apart.

    Published configs leave out what is as usual, the vocabulary too.
    """
    known = of_whole_layers(
        config, vocab_size=262_208, num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=4096,
        max_position_embeddings=131_072, rope_theta=1e6, rope_local_base_freq=10_000.0, query_pre_attn_scalar=256,
        tie_word_embeddings=True, sliding_window_pattern=6,
    )  # fmt: skip
    every = layers_of(known, "sliding_window_pattern")
    return (
        _gemma_like(known, _GELU)
        | windows(known, known["sliding_window"], lambda layer: (layer + 1) % every != 0)
        | {
            "vocab": known["vocab_size"],
            "norm_placement": "both",
            "qk_norm": "head",
            "query_scale": known["query_pre_attn_scalar"],
            "attention_softcap": known.get("attn_logit_softcapping", 0.0),
            "logit_softcap": known.get("final_logit_softcapping", 0.0),
            "uncounted": uncounted(known, rope_local_base_freq=known["rope_theta"]),
        }
    )


def _gemma_like(config: Config, activations: Mapping[str, str]) -> Fields:
    # hidden_act, which the first configs of Gemma 2 have too, is not read by transformers from there on
    one_of(config, "hidden_activation", "gelu_pytorch_tanh", activations)
    refuse_unless(config, "use_bidirectional_attention", False)
    gated = {"mlp": "geglu", "activation": "gelu_tanh", "scaled_embedding": True}
    return llama_like({**config, "hidden_act": "silu"}) | gated


GEMMAS: Mapping[str, Callable[[Config], Fields]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
