"""Decoders beside images, and families whose configs state several kinds of layers, have Hugging Face's parameters."""

from __future__ import annotations

import json

import pytest
import torch

from published_configs import SMALL, Config, theirs
from trimaran.files.hugging_face_config import model_from_config

# Decoders that read images beside text, as far as small ones have their families' traits.
DECODERS: dict[str, Config] = {
    "qwen2_vl": {"num_key_value_heads": 2},
    "qwen2_5_vl": {"num_key_value_heads": 2},
    "qwen3_vl": {"num_key_value_heads": 2, "head_dim": 64},
    # its decoder's own default is a tied embedding, which the whole model's says is not
    "qwen3_vl_moe": {
        "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "glm4v": {"num_key_value_heads": 2, "pad_token_id": 0},
    "glm4v_moe": {
        "num_key_value_heads": 2, "head_dim": 32, "n_routed_experts": 8, "moe_intermediate_size": 64, "pad_token_id": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", DECODERS)
def test_the_decoder_of_a_model_that_sees_images_has_its_parameters(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(kind, text_config=SMALL | DECODERS[kind])
    with torch.device("meta"):
        module = AutoModelForImageTextToText.from_config(config)
    named = dict(module.named_parameters())
    counted = sum(
        each.numel() for name, each in named.items() if "language_model" in name or name.startswith("lm_head")
    )
    model = model_from_config(json.loads(json.dumps(config.to_dict(), default=str)), kind)
    assert (model.unpadded_parameters, model.uncounted) == (counted, (f"vision_config of {kind}",))


def test_a_decoder_is_read_where_its_keys_stand_beside_the_vision_or_in_a_section_of_another_name() -> None:
    """As Qwen2-VL and InternVL were published."""
    turned = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {"depth": 2}}
    qwen2 = SMALL | {"model_type": "qwen2", "num_key_value_heads": 2}
    flat = model_from_config(qwen2 | turned | {"model_type": "qwen2_vl"}, "small")
    within = model_from_config(
        {"model_type": "internvl_chat", "llm_config": qwen2, "vision_config": {"depth": 2}}, "small"
    )
    decoder = model_from_config(qwen2, "small")
    assert flat == decoder.model_copy(update={"uncounted": ("vision_config of qwen2_vl",)})
    assert within == decoder.model_copy(update={"uncounted": ("vision_config of internvl_chat",)})


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("falcon", {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}),
        ("falcon", {"bias": True, "ffn_hidden_size": 300, "parallel_attn": False, "tie_word_embeddings": False}),
        ("gpt_bigcode", {"multi_query": False, "n_layer": 2, "n_embd": 128, "n_head": 4}),
        ("stablelm", {"num_key_value_heads": 4, "tie_word_embeddings": True, "use_qkv_bias": True}),
        (
            "granitemoehybrid",
            {
                "layer_types": ["attention"] * 2, "mamba_d_head": 64, "mamba_n_heads": 4, "num_local_experts": 4,
                "shared_intermediate_size": 512,
            },
        ),
        ("llama", {"mlp_bias": True}),
        ("exaone4", {"num_hidden_layers": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
        ("helium", {"attention_bias": True, "head_dim": 32, "num_key_value_heads": 2}),
        ("helium", {"head_dim": 32, "mlp_bias": True, "num_key_value_heads": 4}),
        ("hunyuan_v1_dense", {"attention_bias": True, "head_dim": 64, "num_key_value_heads": 2}),
        ("jais2", {"num_key_value_heads": 2}),
        ("jais2", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}),
        ("seed_oss", {"attention_bias": False, "head_dim": 64, "mlp_bias": True, "num_key_value_heads": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_a_familys_other_kinds_have_the_parameters_of_hugging_faces(kind: str, change: Config) -> None:
    config = SMALL | change | {"model_type": kind}
    counted = sum(parameter.numel() for parameter in theirs(config).parameters())
    assert model_from_config(config, kind).unpadded_parameters == counted


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, {"dense": 1, "experts": 3}),
        ({"moe_layer_start_index": 0, "moe_num_shared_experts": 0}, {"experts": 4}),
        ({"moe_layer_start_index": 3, "moe_layer_end_index": 3}, {"dense": 3, "experts": 1}),
        ({"moe_layer_interval": 2}, {"dense": 2, "experts": 2}),
    ],
    ids=str,
)
def test_ernies_mixtures_have_the_parameters_of_hugging_faces(change: Config, kinds: dict[str, int]) -> None:
    """It counts as parameters what balances experts without a gradient too."""
    config = SMALL | {"num_hidden_layers": 4, "num_key_value_heads": 2, "moe_num_experts": 8, "moe_k": 2} | change
    config |= {"model_type": "ernie4_5_moe", "moe_intermediate_size": 64}
    named = theirs(config).named_parameters()
    counted = sum(each.numel() for name, each in named if "e_score_correction_bias" not in name)
    model = model_from_config(config, "ernie")
    assert (model.unpadded_parameters, model.kinds, model.router.bias) == (counted, kinds, True)


def test_layers_of_exaone_4_without_a_window_have_no_angles_which_is_named() -> None:
    config = SMALL | {"model_type": "exaone4", "num_hidden_layers": 4, "num_key_value_heads": 2}
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    # as published: the pattern in letters, and each layer's kind
    for stated in ({}, {"sliding_window_pattern": "LLLG", "layer_types": layers}):
        model = model_from_config(config | stated, "exaone")
        assert (model.sliding_window, model.full_attention_every, model.norm_placement) == (4096, 4, "after")
        assert model.uncounted == ("sliding_window 4096: layers without it have no angles",)
    whole = model_from_config(config | {"sliding_window": None, "sliding_window_pattern": None}, "exaone")
    assert (whole.sliding_window, whole.uncounted) == (0, ())
