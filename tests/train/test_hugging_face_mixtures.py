"""Mixtures of experts go to Hugging Face and come from there, and compute the same on both sides."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pool import Pool
from test_gpt import CPU, make_trainer
from test_hugging_face import VOCAB, assert_logits, losses_at_start, some_tokens
from trimaran.files.catalogue import load_model
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import TrainJob
from trimaran.train.state.hugging_face import write_folder
from trimaran.train.state.weight_source import open_source, whole_logits, whole_model

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": VOCAB, "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN3 = SIZES | {"head_dim": 16, "intermediate_size": 80, "moe_intermediate_size": 24, "num_experts": 8,
                 "num_experts_per_tok": 3}  # fmt: skip
DEEPSEEK = SIZES | {
    "num_key_value_heads": 6, "intermediate_size": 80, "moe_intermediate_size": 24, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 6.0, "original_max_position_embeddings": 16, "beta_fast": 3.0,
    "mscale": 0.9, "mscale_all_dim": 0.5,
}  # fmt: skip
KINDS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, intermediate_size=40, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**QWEN3, norm_topk_prob=True),
    "qwen3_moe, as they are, a dense layer": lambda: transformers.Qwen3MoeConfig(**QWEN3, mlp_only_layers=[0]),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK, n_shared_experts=1),
    "deepseek_v3, no groups, not normalised, queries whole": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}, n_shared_experts=2, norm_topk_prob=False
    ),
    "deepseek_v3, yarn": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK | {"qk_rope_head_dim": 8, "max_position_embeddings": 96}, n_shared_experts=1, rope_parameters=YARN
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK, n_shared_experts=2, topk_method="group_limited_greedy"
    ),
    "deepseek_v2, yarn between whole features": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK | {"qk_rope_head_dim": 8, "max_position_embeddings": 96},
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        rope_parameters=YARN | {"truncate": False, "mscale": None},
    ),
    "deepseek_v2, greedy, queries whole": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0}, n_shared_experts=1
    ),
}


def biases_of_routers(model: Any) -> list[torch.Tensor]:
    """Biases that count in the choice of experts alone, which are no parameters."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def theirs(kind: str) -> Any:
    """A model whose every parameter is drawn, norms and routers too, so that none can be forgotten."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind](), attn_implementation="eager")
    with torch.no_grad():
        for parameter in (*model.parameters(), *biases_of_routers(model)):
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_of_mixtures_are_those_of_transformers_both_ways(tmp_path: Path, kind: str) -> None:
    reference = theirs(kind)
    reference.save_pretrained(tmp_path / "theirs")
    expected = reference(some_tokens()).logits
    source = open_source(tmp_path / "theirs")
    ours = whole_logits(whole_model(source, CPU, torch.float32), some_tokens())
    assert expected.std() > 0.1
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)

    write_folder(source.model, source.read, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    torch.testing.assert_close(back(some_tokens()).logits, expected, rtol=0, atol=1e-6)
    config = str(tmp_path / "back" / "config.json")
    untrained = {"name", "mtp_depth"}
    assert load_model(config).model_dump(exclude=untrained) == source.model.model_dump(exclude=untrained)


LAYOUTS = (
    "dp4,ep2,etp2,mbs2", "mbs8", "dp2,ep2,mbs4,fsdp", "tp2,mbs4,sp,ep2,etp1", "tp2,mbs4,sp", "pp2,mbs4", "cp2,ep2,mbs4",
    "cp2,tp2,mbs4,sp,ep4,etp1,cp-all_gather", "dp2,tp2,pp2,mbs2,sp,ep4,etp1,zero1",
)  # fmt: skip
OF_EACH_FAMILY = ("mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v2")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[] if layout == LAYOUTS[number] else pytest.mark.proof)
        for number, kind in enumerate(OF_EACH_FAMILY)
        for layout in LAYOUTS
    ],
)
def test_logits_of_mixtures_are_those_of_transformers_on_every_layout(
    pool: Pool, make_job: Callable[..., TrainJob], tmp_path: Path, kind: str, layout: str
) -> None:
    assert_logits(pool, make_job, layout, theirs(kind), tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v2"])
def test_a_training_begins_with_the_loss_of_theirs(
    make_job: Callable[..., TrainJob], tmp_path: Path, kind: str
) -> None:
    ours, expected = losses_at_start(make_job, "tp2,pp2,mbs12,sp,ep2,etp1", theirs(kind), tmp_path)
    assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_nextn_predict_layers": 1}, "multi-token prediction is not trained: set it to 0 in config.json"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is 'fp8'"),
        ({"rope_interleave": False}, "rope_interleave is False, not True"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_parameters": None},
            "model.rotary_stretch is dynamic",
        ),
    ],
    ids=["multi-token prediction", "quantised", "angles of halves", "stretched"],
)
def test_what_is_not_trained_of_a_deepseek_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    theirs("deepseek_v3").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    save_file(load_file(weights) | {"model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, weights)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 0} | change))
    with pytest.raises(TrimaranError) as caught:
        open_source(tmp_path)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_deepseek_s_layers_of_further_tokens_are_left_out_once_its_config_says_so(tmp_path: Path) -> None:
    theirs("deepseek_v3").save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    before = load_file(weights)
    further = {"eh_proj.weight": torch.zeros(2, 2), "enorm.weight": torch.zeros(2)}
    save_file(before | {f"model.layers.3.{name}": tensor for name, tensor in further.items()}, weights)
    stated = json.loads(config.read_text())
    config.write_text(json.dumps(stated | {"num_nextn_predict_layers": 1}))
    with pytest.raises(TrimaranError, match=r"set it to 0 in config\.json to leave those weights out"):
        open_source(tmp_path)
    config.write_text(json.dumps(stated | {"num_nextn_predict_layers": 0}))
    source = open_source(tmp_path)
    torch.testing.assert_close(source.read("norm.weight"), before["model.norm.weight"], rtol=0, atol=0)
    # a layer that is none of these makes another model
    save_file(before | {"model.layers.3.enorm.weight": torch.zeros(2)}, weights)
    with pytest.raises(TrimaranError, match=r"has a tensor 'model\.layers\.3\.enorm\.weight'"):
        open_source(tmp_path)


def test_the_loss_of_the_load_is_that_of_transformers(make_job: Callable[..., TrainJob], tmp_path: Path) -> None:
    """Theirs is of all sequences and layers together, and counts a token for each of its experts: of one, k of ours."""
    torch.manual_seed(1)
    one_layer = KINDS["mixtral"]()
    one_layer.num_hidden_layers = 1
    reference = transformers.MixtralForCausalLM(one_layer).eval()
    reference.save_pretrained(tmp_path)
    model = load_model(str(tmp_path / "config.json"))
    job = make_job("mbs1", model=model, global_batch=1, init_from=str(tmp_path), balance_loss=0.01)
    trainer = make_trainer(job)
    text = torch.from_numpy(trainer._sampler.batch(0, 1))
    with torch.no_grad():
        expected = reference(text[:, :-1], output_router_logits=True).aux_loss.item()
    load = trainer.step().load
    assert load is not None and load.balance_loss is not None
    assert 2 * load.balance_loss == pytest.approx(expected, rel=1e-5)
