"""Families' configs give the parameters and operations of Hugging Face's own models, built without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode

from published_configs import LATENT, PUBLISHED, PUBLISHED_MIXTURES, SMALL, Config, theirs
from trimaran.api import plan
from trimaran.files.catalogue import catalogue_names, load_model
from trimaran.files.hugging_face_config import model_from_config
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.operators.counts import head_forward_operations, layer_forward_operations, layers_forward_operations


@pytest.mark.parametrize("name", [*PUBLISHED, *PUBLISHED_MIXTURES])
def test_parameters_are_those_of_hugging_faces_own_model(name: str) -> None:
    config = (PUBLISHED | PUBLISHED_MIXTURES)[name]
    counted = sum(parameter.numel() for parameter in theirs(config).parameters())
    assert model_from_config(config, name).unpadded_parameters == counted


@pytest.mark.parametrize(
    ("name", "catalogued"),
    [
        ("Llama-3.1-8B", "llama3.1-8b"),
        ("Llama-3.1-70B", "llama3.1-70b"),
        ("Llama-3.1-405B", "llama3.1-405b"),
        ("Mistral-7B-v0.1", "mistral-7b"),
        ("Qwen2.5-7B", "qwen2.5-7b"),
        *((name, name.lower()) for name in PUBLISHED if name.startswith("Qwen3-")),
        ("Llama-3.2-1B", "llama3.2-1b"),
        ("Llama-3.2-3B", "llama3.2-3b"),
        ("gemma-2-9b", "gemma2-9b"),
        *((name, name) for name in PUBLISHED_MIXTURES if name in catalogue_names("models")),
    ],
)
def test_the_catalogue_has_what_is_published(name: str, catalogued: str) -> None:
    published, ours = model_from_config((PUBLISHED | PUBLISHED_MIXTURES)[name], name), load_model(catalogued)
    assert (ours.unpadded_parameters, ours.traits) == (published.unpadded_parameters, published.traits)
    assert ours.layer_shape == published.layer_shape


# The first of two layers is dense.
SMALL_LATENT: Config = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
KINDS: dict[str, Config] = {
    "gpt2": {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_inner": 256},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 64},
    "olmo2": {"num_key_value_heads": 2},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 64},
    "gemma": {"num_key_value_heads": 2, "head_dim": 64},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 64},
    "starcoder2": {"num_key_value_heads": 2},
    "granite": {"num_key_value_heads": 2, "attention_multiplier": 0.25},
    "glm": {"num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0},
    "glm4": {"num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0},
    "smollm3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "olmo3": {"num_key_value_heads": 2},
    "seed_oss": {"num_key_value_heads": 2, "head_dim": 64},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 64},
    "exaone4": {"num_key_value_heads": 2},
    "helium": {"num_key_value_heads": 2, "head_dim": 32},
    "hunyuan_v1_dense": {"num_key_value_heads": 2, "head_dim": 64},
    "jais2": {"num_key_value_heads": 2, "hidden_act": "relu2"},
    "ernie4_5_moe": {
        "num_key_value_heads": 2, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1,
    },
    "qwen2_moe": {
        "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    },
    "olmoe": {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoeshared": {
        "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 512,
    },
    "glm4_moe": {
        "num_key_value_heads": 2, "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "first_k_dense_replace": 1, "use_qk_norm": True,
    },
    "dots1": {
        "num_key_value_heads": 2, "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "minimax_m2": {"num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "gpt_oss": {
        "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 0,
    },
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "gpt_bigcode": {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_inner": 256},
    "stablelm": {"num_key_value_heads": 2},
    "ministral3": {"num_key_value_heads": 2, "head_dim": 64},
    "granitemoehybrid": {
        "num_key_value_heads": 2, "num_local_experts": 0, "layer_types": ["attention"] * 2, "mamba_n_heads": 4,
        "mamba_d_head": 64, "shared_intermediate_size": 384, "position_embedding_type": "rope",
    },
    "deepseek_v2": SMALL_LATENT | {"n_shared_experts": 2},
    "deepseek_v3": SMALL_LATENT | {"n_shared_experts": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_those_of_hugging_faces_own_model(kind: str) -> None:
    config, s = SMALL | KINDS[kind] | {"model_type": kind}, 32
    module = theirs(config, "cpu")
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros((1, s), dtype=torch.long), use_cache=False)
    model = model_from_config(config, kind)
    ours = layers_forward_operations(model, s) + head_forward_operations(model, s)
    # theirs counts the angles' own product too: positions times frequencies, once a forward
    angles = s * model.head_dim * model.rotary_share
    assert ours <= counter.get_total_flops() <= ours + angles


def windowed(every: int, window: int = 16) -> Model:
    return model_from_config(SMALL | {"model_type": "llama"}, "small").model_copy(
        update={"layers": 4, "sliding_window": window, "full_attention_every": every}
    )


def kept_pairs(s: int, window: int) -> int:
    """Pairs of tokens that a causal window keeps, counted one by one."""
    positions = torch.arange(s)
    apart = positions[:, None] - positions[None]
    return int(((apart >= 0) & (apart < window)).sum())


@pytest.mark.parametrize("every", [0, 2, 4])
def test_windows_shorten_the_scores_of_the_layers_that_have_them(every: int) -> None:
    s, window = 1024, 128
    whole, windows = windowed(every, s), windowed(every, window)
    saved = layer_forward_operations(whole, s) - layer_forward_operations(windows, s)
    share = 1.0 - (4 // every) / 4 if every else 1.0
    # 4 operations a pair and feature, twice: scores are counted as if no half were masked
    pairs = 2 * (kept_pairs(s, s) - kept_pairs(s, window))
    assert saved == pytest.approx(share * 4 * whole.attention_hidden * pairs, rel=0.01)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "qwen3_next"}, "qwen3_next has linear attention in three of four layers: no model here has"),
        ({"model_type": "deepseek_v32"}, "deepseek_v32 has attention to tokens that an indexer chooses"),
        ({"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window is True, not False"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (
            {"model_type": "llama4_text", "interleave_moe_layer_step": 3},
            "layers 4 is not a multiple of experts_every 3",
        ),
        ({"model_type": "llama4_text", "moe_layers": [1, 3]}, "moe_layers is [1, 3], not every 1 layers"),
        (
            {"model_type": "qwen2_moe", "moe_intermediate_size": 100},
            "shared_expert_intermediate_size is 5632, not a multiple of moe_intermediate_size 100",
        ),
        ({"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}}, "'mllama_text_model' is not"),
        ({"model_type": "falcon"}, "parallel_attn is True without new_decoder_architecture: one norm for attention"),
        (
            {"model_type": "falcon", "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
            "num_ln_in_parallel_attn is 1: one norm for attention and MLP side by side",
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["attention", "mamba"] * 2},
            "layer_types has 'mamba': state-space layers",
        ),
        ({"model_type": "seed_oss", "attention_bias": False, "attention_out_bias": True}, "attention_out_bias is True"),
        ({"model_type": "deepseek_v2", "use_mla": False}, "use_mla is False, not True"),
        ({"model_type": "stablelm", "qk_layernorm": True}, "qk_layernorm is True, not False"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG', expected a"),
        ({"model_type": "ernie4_5_moe", "use_bias": True}, "use_bias is True, not False"),
        (
            {"model_type": "ernie4_5_moe", "moe_layer_end_index": 2},
            "moe_layer_start_index 1, moe_layer_end_index 2 and moe_layer_interval 1 leave 2 of 4 layers with experts",
        ),
        ({"model_type": "gemma2", "hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "max_window_layers is 1"),
        (
            {"model_type": "gemma2", "layer_types": ["sliding_attention", "linear_attention"]},
            "holds 'linear_attention'",
        ),
    ],
    ids=str,
)
def test_what_no_model_can_say_is_refused_by_its_key(tmp_path: Path, change: Config, says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"num_hidden_layers": 4} | change))
    with pytest.raises(TrimaranError) as caught:
        load_model(str(tmp_path / "config.json"))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "like"), [("rwkv", "that are known: if"), ("qwen", "of which those like it are qwen3, qwen2, ")]
)
def test_a_family_that_is_not_known_is_told_with_those_like_it_and_no_others(kind: str, like: str) -> None:
    """All of them filled a screen, with the way out at its end."""
    with pytest.raises(TrimaranError) as caught:
        model_from_config(SMALL | {"model_type": kind}, "model config.json")
    assert like in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("kind", ["llama4_text", "ernie4_5_moe", "gemma3_text", "qwen3_moe"])
def test_more_layers_than_a_model_has_are_refused_ahead_of_a_list_of_them(tmp_path: Path, kind: str) -> None:
    """A list of Llama 4's took all memory."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": kind, "num_hidden_layers": 10**12}))
    with pytest.raises(TrimaranError, match="layers: Input should be less than or equal to 100000"):
        load_model(str(tmp_path / "config.json"))


def test_cwm_has_its_layers_without_a_window_ahead_of_the_others(tmp_path: Path) -> None:
    """Facebook's CWM, whose order of layers no Model has, costs what the other order does."""
    plain = {
        "model_type": "cwm", "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 4, "vocab_size": 1000,
        "num_key_value_heads": 4, "intermediate_size": 1024,
    }  # fmt: skip
    kinds = ["full_attention", *["sliding_attention"] * 3] * 2
    for config in (plain, plain | {"layer_types": kinds, "sliding_window": 8192}):
        model = model_from_config(config, "cwm")
        assert (model.sliding_window, model.full_attention_every, model.kv_heads) == (8192, 4, 4)
        assert model.rotary_scaling is not None and model.rotary_scaling.factor == 16.0
        assert model.uncounted == ("of each 4 layers the first without a window, counted as the last",)
    (tmp_path / "config.json").write_text(json.dumps(plain | {"layer_types": kinds[1:] + kinds[:1]}))
    with pytest.raises(TrimaranError, match="have no sliding window: a Model has every n-th such"):
        load_model(str(tmp_path / "config.json"))


def test_what_takes_no_time_is_named_and_not_trained_as_if_it_were_not_there(tmp_path: Path) -> None:
    granite = PUBLISHED["granite-3.1-8b"]
    model = model_from_config(granite, "granite")
    assert model.uncounted == ("embedding_multiplier 12.0", "residual_multiplier 0.22", "logits_scaling 16.0")
    # scores are multiplied by what the config states
    assert model.query_scale == 128.0**2
    (tmp_path / "config.json").write_text(json.dumps(granite))
    file = str(tmp_path / "config.json")
    planned = plan(file, "dgx-h100", 64, stack="megatron-core", fix={"tp": 1, "pp": 1, "mbs": 1})
    assert "which is not counted: embedding_multiplier 12.0" in " ".join(planned.notes)
    with pytest.raises(TrimaranError, match=r"model\.uncounted is"):
        plan(file, "dgx-h100", 64, stack="trimaran")


@pytest.mark.parametrize("name", ["gemma-3-27b", "Llama-4-Scout"])
def test_of_a_model_that_sees_images_the_texts_decoder_is_read(name: str) -> None:
    text = dict((PUBLISHED | PUBLISHED_MIXTURES)[name])
    decoder = model_from_config(text, name)
    whole = {"model_type": text["model_type"].removesuffix("_text"), "text_config": text, "vision_config": {"depth": 2}}
    for config in (whole, whole | {"text_config": {k: v for k, v in text.items() if k != "model_type"}}):
        model = model_from_config(config, name)
        assert model.uncounted == (*decoder.uncounted, f"vision_config of {whole['model_type']}")
        assert model.model_copy(update={"uncounted": decoder.uncounted}) == decoder


def test_published_gemma_3_leaves_out_what_is_usual() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"depth": 2}}
    counted = sum(each.numel() for each in theirs(text | {"model_type": "gemma3_text"}).parameters())
    model = model_from_config(whole, "gemma-3-4b")
    assert model.unpadded_parameters == counted and (model.vocab, model.full_attention_every) == (262_208, 6)


def test_layers_that_alternate_are_told_from_their_types() -> None:
    config = SMALL | {"num_hidden_layers": 4, "model_type": "gemma2", "sliding_window": 8}
    types = ["sliding_attention", "full_attention"] * 2
    for stated in ({}, {"layer_types": types}):
        model = model_from_config(config | stated, "small")
        assert (model.sliding_window, model.full_attention_every) == (8, 2)
    whole = model_from_config(config | {"layer_types": ["full_attention"] * 4}, "small")
    assert "sliding_window" not in whole.traits


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"top_k": 2}, "top_k is 2, but experts is 0"),
        ({"experts": 4, "top_k": 2}, "experts is 4, but moe_ffn_hidden is 0"),
        ({"experts": 4, "top_k": 8, "moe_ffn_hidden": 8}, "top_k 8 is more than experts 4"),
        ({"experts": 4, "top_k": 2, "moe_ffn_hidden": 8, "dense_layers": 2}, "dense_layers 2 leave none of 2 layers"),
        ({"experts": 4, "top_k": 2, "moe_ffn_hidden": 8, "expert_groups": 2}, "top_groups 0 is not one of 1 to"),
        (
            {"experts": 4, "top_k": 2, "moe_ffn_hidden": 8, "expert_groups": 3, "top_groups": 1},
            "not a multiple of expert",
        ),
        (
            {"experts": 4, "top_k": 2, "moe_ffn_hidden": 8, "expert_groups": 4, "top_groups": 1},
            "more than the 1 experts",
        ),
        ({"full_attention_every": 2}, "full_attention_every is 2, but sliding_window is 0"),
    ],
    ids=str,
)
def test_traits_that_contradict_each_other_are_refused(change: dict[str, int], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Model.model_validate({"layers": 2, "hidden": 64, "heads": 4, "vocab": 100} | change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [0]},
            "decoder_sparse_step is 2, not 1",
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers is "),
        ({"model_type": "deepseek_v3"} | LATENT | {"qk_nope_head_dim": "wide"}, "qk_nope_head_dim is 'wide'"),
    ],
    ids=str,
)
def test_a_mixture_that_no_model_can_say_is_refused_by_its_key(change: Config, says: str) -> None:
    with pytest.raises(TrimaranError) as caught:
        model_from_config(SMALL | change, "small")
    assert says in str(caught.value)


MIXTURE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"intermediate_size": 0}, "intermediate_size is 0, expected a whole number from 1 on"),
        ({"head_dim": 0}, "head_dim is 0, expected a whole number from 1 on"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4', expected a whole number"),
        ({"num_experts": True}, "num_experts is True, expected a whole number"),
        ({"num_experts_per_tok": [2]}, "num_experts_per_tok is "),
        ({"vocab_size": float("nan")}, "vocab_size is nan"),
        ({"rope_theta": 0}, "rope_theta is 0, expected a number above 0"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6', expected a number above 0"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob is 'false', expected true or false"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"mlp_only_layers": 1}, "mlp_only_layers is 1, expected a list"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', expected a list"),
    ],
    ids=str,
)
def test_a_value_that_its_key_cannot_have_is_refused_and_never_taken_for_the_default(change: Config, says: str) -> None:
    with pytest.raises(TrimaranError) as caught:
        model_from_config(SMALL | MIXTURE | change, "small")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_null_is_what_a_config_does_not_state_and_whole_floats_are_numbers() -> None:
    stated = model_from_config(SMALL | MIXTURE | {"num_hidden_layers": 4}, "small")
    null = {"head_dim": None, "rope_theta": None, "sliding_window": None, "layer_types": None, "mlp_only_layers": None}
    assert model_from_config(SMALL | MIXTURE | {"num_hidden_layers": 4.0} | null, "small") == stated


@pytest.mark.parametrize("change", [{"scoring_func": "softmax"}, {"topk_method": "greedy"}], ids=str)
def test_a_router_that_a_family_does_not_have_is_refused(change: Config) -> None:
    config = SMALL | LATENT | {"model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2}
    config |= {"moe_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8}
    assert model_from_config(config | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}, "small").experts == 8
    with pytest.raises(TrimaranError, match=next(iter(change))):
        model_from_config(config | change, "small")


def test_a_config_without_its_family_is_told_what_it_lacks(tmp_path: Path) -> None:
    config = {key: value for key, value in (SMALL | MIXTURE).items() if key != "model_type"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3MoeForCausalLM"]}))
    with pytest.raises(TrimaranError, match="key 'model_type' is missing"):
        load_model(str(tmp_path / "config.json"))
