"""Multi-token prediction: a layer, a joining and a head more on the last stage, where the software has them."""

from __future__ import annotations

import numpy as np
import pytest

from trimaran.api import plan
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.estimates import Estimate
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.files.hugging_face_config import model_from_config
from trimaran.layout.flops import megatron_core_flops, model_flops
from trimaran.layout.layout import resolve_split
from trimaran.layout.notation import parse_layout
from trimaran.layout.stages import weighted_split
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.operators.counts import head_in_layers

DEEPSEEK, CLUSTER = load_model("deepseek-v3"), load_cluster("dgx-h100")
MEGATRON, TITAN = load_stack("megatron-core"), load_stack("torchtitan")
SMALL = Model(
    name="small", layers=8, hidden=1024, heads=8, vocab=32_000, positions="rotary", norm="rmsnorm", mlp="swiglu",
    bias=False, tied_embedding=False,
)  # fmt: skip


def predicted(model: Model, layout: str, stack: str = "megatron-core") -> Estimate:
    workload = Workload(model=model, seq_len=2048, global_batch=64)
    return estimate(Case.of(workload, CLUSTER, load_stack(stack)), parse_layout(layout))


def deeper(model: Model, depth: int) -> Model:
    return model.model_copy(update={"mtp_depth": depth})


def test_the_catalogue_and_hugging_face_s_config_state_the_depth() -> None:
    assert DEEPSEEK.mtp_depth == 1
    assert load_model("kimi-k2").mtp_depth == 0
    published = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "vocab_size": 129280, "intermediate_size": 18432, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    assert model_from_config(published, "config.json").mtp_depth == 1
    assert DEEPSEEK.parameters == deeper(DEEPSEEK, 0).parameters, "as it is published, and as Hugging Face counts"


@pytest.mark.parametrize("flops", [model_flops, megatron_core_flops])
def test_each_further_token_costs_a_layer_a_joining_and_a_head(flops: object) -> None:
    assert callable(flops)
    none, one, two = (flops(deeper(SMALL, depth), 2048, 1.0) for depth in range(3))
    shallower = flops(SMALL.model_copy(update={"layers": 7}), 2048, 1.0)
    vocab, joined = 6 * 2048 * 1024 * 32_000, 6 * 2048 * 2 * 1024**2
    assert one - none == pytest.approx(two - one)
    # Megatron-Core counts the joining's three norms as a product each
    assert one - none == pytest.approx((none - shallower) + vocab + joined, rel=1e-3)


def test_a_rank_that_holds_all_has_the_weights_and_the_work_of_the_modules() -> None:
    layout = "dp8,mbs1,bf16"
    without, with_one = predicted(SMALL, layout), predicted(deeper(SMALL, 1), layout)
    more = SMALL.layer_parameters + 2 * 1024**2 + 3 * 1024
    assert (with_one.memory[0].weights - without.memory[0].weights) * 2**30 == pytest.approx(2 * more)
    longer = with_one.sec_per_it / without.sec_per_it
    assert longer == pytest.approx(model_flops(deeper(SMALL, 1), 2048, 1) / model_flops(SMALL, 2048, 1), rel=0.1)
    assert with_one.memory[0].logits > 2 * without.memory[0].logits


def test_only_the_last_stage_has_them_with_an_embedding_of_its_own() -> None:
    layout = "dp2,pp4,mbs1,bf16,split2x4"
    without, with_one = predicted(SMALL, layout), predicted(deeper(SMALL, 1), layout)
    for before, after in zip(without.memory[:-1], with_one.memory[:-1], strict=True):
        assert before == after
    embedding, module = 32_000 * 1024, SMALL.layer_parameters + 2 * 1024**2 + 3 * 1024
    grown = (with_one.memory[-1].weights - without.memory[-1].weights) * 2**30
    assert grown == pytest.approx(2 * (embedding + module))


def test_both_stages_with_an_embedding_sum_its_gradient() -> None:
    """Megatron-Core 0.16.1, finalize_model_grads.py, _get_shared_word_embedding_weight: tied, or mtp_num_layers."""
    layout = "dp1,pp4,mbs1,bf16,split2x4"
    tied = SMALL.model_copy(update={"tied_embedding": True})
    alone, summed, further = (predicted(model, layout).time.dp for model in (SMALL, tied, deeper(SMALL, 1)))
    assert alone == 0.0 < summed
    assert further == pytest.approx(summed)
    assert predicted(deeper(SMALL, 1), "dp1,mbs1,bf16").time.dp == 0.0


def test_software_that_has_none_leaves_them_out_and_says_so() -> None:
    layout = "dp8,fsdp,mbs1,bf16"
    assert predicted(SMALL, layout, "torchtitan") == predicted(deeper(SMALL, 3), layout, "torchtitan")
    found = plan(deeper(SMALL, 2), "dgx-h100", 64, devices=8, seq=2048, stack="torchtitan", top=1)
    assert found.notes == ("multi-token prediction of depth 2 is left out of small: torchtitan has none",)
    has_it = plan(deeper(SMALL, 2), "dgx-h100", 64, devices=8, seq=2048, stack="megatron-core", top=1)
    assert not any("left out" in note for note in has_it.notes)
    workload, layout_of = Workload(model=deeper(DEEPSEEK, 1), seq_len=4096, global_batch=64), parse_layout("pp16")
    assert resolve_split(layout_of, workload, TITAN) == resolve_split(
        layout_of, workload.model_copy(update={"model": deeper(DEEPSEEK, 0)}), TITAN
    )


def test_a_heavy_end_leaves_the_last_stage_without_layers_where_the_software_can() -> None:
    weight = head_in_layers(DEEPSEEK, 4096)
    assert weight > 2 * head_in_layers(deeper(DEEPSEEK, 0), 4096)
    assert weighted_split(61, 32, weight, bare_ends=True)[-1] == 0
    assert weighted_split(61, 32, weight)[-1] == 1
    split = {bare: np.array(weighted_split(61, 32, weight, bare)) for bare in (False, True)}
    slowest = {bare: max(layers + weight * (np.arange(32) == 31)) for bare, layers in split.items()}
    assert slowest[True] == pytest.approx(slowest[False] - 1)
