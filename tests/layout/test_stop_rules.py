"""What some software's own checks refuse is refused before, and no plan offers it."""

from __future__ import annotations

import pytest

from trimaran.api import plan, workload_of
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.nouns.noun import TrimaranError

NAMES = ("megatron-core", "torchtitan", "torchtitan-0.2", "torchtitan-0.2-compiled", "deepspeed", "trimaran")
MEGATRON, TORCHTITAN, TORCHTITAN_02, COMPILED_02, DEEPSPEED, TRIMARAN = (load_stack(name) for name in NAMES)
GRAPHS = load_stack("megatron-core-graphs")
CLUSTER = load_cluster("dgx-h100").model_copy(update={"nodes": 512})
STOPS = {
    "delayed_recompute", "biased_slices", "whole_experts", "experts_over_copies", "stages_among_experts",
    "ulysses_halves", "halves_of_slices", "further_positions",
    "narrow_blocks", "graphs_again", "graphs_offloaded",
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "model", "stack", "rules"),
    [
        ("dp8,recompute-layernorm+moe_act,fp8", "qwen3-30b-a3b", MEGATRON, {"delayed_recompute"}),
        ("dp8,recompute-layernorm+moe_act,mxfp8", "qwen3-30b-a3b", MEGATRON, set()),
        ("dp8,recompute-layernorm+moe_act,bf16", "qwen3-30b-a3b", MEGATRON, set()),
        ("dp8,recompute-mlp,fp8", "llama3-8b", MEGATRON, set()),
        ("dp8,recompute-full,bf16", "llama3-8b", GRAPHS, {"graphs_again"}),
        ("dp8,recompute-full4,bf16", "llama3-8b", GRAPHS, {"graphs_again"}),
        ("dp8,recompute-full,bf16", "llama3-8b", MEGATRON, set()),
        ("dp8,recompute-mlp,bf16", "llama3-8b", GRAPHS, set()),
        ("dp8,offload-activations,bf16", "llama3-8b", GRAPHS, {"graphs_offloaded"}),
        ("dp8,offload-optimizer,zero1,bf16", "llama3-8b", GRAPHS, set()),
        ("dp8,recompute-layernorm+moe,bf16", "qwen3-30b-a3b", GRAPHS, {"graphs_again"}),
        ("dp8,recompute-layernorm+moe_act,bf16", "qwen3-30b-a3b", GRAPHS, set()),
        ("dp8,tp2,sp,bf16", "gpt-oss-20b", MEGATRON, {"biased_slices"}),
        ("dp8,tp2,sp,etp1,bf16", "gpt-oss-20b", MEGATRON, set()),
        ("dp8,tp2,sp,bf16", "qwen3-30b-a3b", MEGATRON, set()),
        ("dp8,ep8,bf16", "qwen3-30b-a3b", TORCHTITAN, {"whole_experts"}),
        ("dp8,ep8,fsdp,bf16", "qwen3-30b-a3b", TORCHTITAN, set()),
        ("dp8,ep8,bf16", "qwen3-30b-a3b", MEGATRON, set()),
        ("dp64,shard8,ep8,fsdp,bf16", "qwen3-30b-a3b", TORCHTITAN, set()),
        ("dp64,shard8,ep16,fsdp,bf16", "qwen3-30b-a3b", TORCHTITAN, {"experts_over_copies"}),
        ("dp64,shard8,ep16,zero1,bf16", "qwen3-30b-a3b", MEGATRON, {"experts_over_copies"}),
        ("dp64,shard8,ep16,fsdp,bf16", "qwen3-30b-a3b", TRIMARAN, set()),
        ("dp64,ep16,zero1,bf16", "qwen3-30b-a3b", MEGATRON, set()),
        ("dp8,pp2,ep8,zero1,bf16,place-tp-pp-dp", "qwen3-30b-a3b", MEGATRON, {"stages_among_experts"}),
        ("dp8,pp2,ep8,zero1,bf16", "qwen3-30b-a3b", MEGATRON, set()),
        ("dp8,tp2,sp,pp2,ep2,etp1,zero1,bf16,place-tp-pp-dp", "qwen3-30b-a3b", MEGATRON, set()),
        ("dp8,pp2,zero1,bf16,place-tp-pp-dp", "llama3-8b", MEGATRON, set()),
    ],
)
def test_what_a_stack_stops_at_is_refused(layout: str, model: str, stack: object, rules: set[str]) -> None:
    workload = workload_of(model, 512, seq=4096)
    found = list(violations(parse_layout(f"{layout},mbs1"), workload, CLUSTER, stack))  # type: ignore[arg-type]
    stopped = [violation for violation in found if violation.rule in STOPS]
    assert {violation.rule for violation in stopped} == rules
    assert all(violation.of == "software" and ": " in violation.sentence for violation in stopped)


@pytest.mark.parametrize(
    ("layout", "seq_len", "stack", "rules"),
    [
        ("cp4,cp-ulysses", 4100, MEGATRON, {"ulysses_halves"}),
        ("cp4,cp-ulysses", 4104, MEGATRON, set()),
        ("cp4,cp-ulysses", 4100, TRIMARAN, set()),
        ("cp1", 4101, MEGATRON, set()),
        ("tp8,sp", 1000, TORCHTITAN_02, {"halves_of_slices"}),
        ("tp8,sp", 1000, COMPILED_02, {"halves_of_slices"}),
        ("tp8,sp", 1000, TORCHTITAN, set()),
        ("tp8,sp", 1008, TORCHTITAN_02, set()),
        ("tp4,sp,cp2", 1016, TORCHTITAN_02, {"halves_of_slices"}),
        ("tp1", 1001, TORCHTITAN_02, set()),
    ],
)
def test_sequences_are_as_long_as_the_stack_wants(layout: str, seq_len: int, stack: object, rules: set[str]) -> None:
    workload = workload_of("llama3-8b", 8, seq=seq_len)
    found = list(violations(parse_layout(f"dp1,{layout},mbs1,bf16"), workload, CLUSTER, stack))  # type: ignore[arg-type]
    assert {violation.rule for violation in found if violation.rule in STOPS} == rules


@pytest.mark.parametrize(
    ("layout", "seq_len", "size"),
    [
        ("tp16,mbs1,mxfp8", 4096, "ffn_hidden 11008 / TP 16 = 688 is not a multiple of 32"),
        ("tp16,mbs1,nvfp4", 4096, ""),
        ("tp16,mbs1,fp8", 4096, ""),
        ("tp32,mbs1,fp8", 4096, "ffn_hidden 11008 / TP 32 = 344 is not a multiple of 16"),
        ("tp32,mbs1,bf16", 4096, ""),
        ("mbs1,mxfp8", 1000, "micro-batch 1 x seq_len 1000 = 1000 is not a multiple of 32"),
        ("mbs4,mxfp8", 1000, ""),
        ("mbs1,fp8", 1000, ""),
        ("tp2,sp,mbs1,fp8", 1000, "micro-batch 1 x seq_len 1000 / TP 2 = 500 is not a multiple of 8"),
        ("tp2,mbs1,fp8", 1000, ""),
        ("cp2,mbs1,fp8", 1000, "micro-batch 1 x seq_len 1000 / CP 2 = 500 is not a multiple of 8"),
    ],
)
def test_operands_are_cast_in_whole_blocks(layout: str, seq_len: int, size: str) -> None:
    cluster, workload = load_cluster("dgx-b200"), workload_of("llama2-7b", 8, seq=seq_len)
    found = [
        violation.sentence
        for violation in violations(parse_layout(f"dp1,{layout}"), workload, cluster, MEGATRON)
        if violation.rule == "narrow_blocks"
    ]
    assert len(found) == bool(size) and all(sentence.startswith(size) for sentence in found), found
    no_stop = list(violations(parse_layout(f"dp1,{layout}"), workload, cluster, TRIMARAN))
    assert all(violation.rule != "narrow_blocks" for violation in no_stop)


def test_megatron_core_predicts_further_tokens_with_rotary_positions_or_none() -> None:
    model = load_model("gpt2-124m").model_copy(update={"mtp_depth": 1})
    with pytest.raises(TrimaranError, match=r"mtp_depth is 1 and model\.positions learned, and megatron-core"):
        plan(model, CLUSTER, 64, devices=8, stack=MEGATRON)
    plan(model.model_copy(update={"mtp_depth": 0}), CLUSTER, 64, devices=8, stack=MEGATRON)
    plan(model, CLUSTER, 64, devices=8, stack=TRIMARAN)


def test_what_megatron_core_stops_at_its_graphs_stop_at_too() -> None:
    assert set(GRAPHS.stops_at) == {*MEGATRON.stops_at, "graphs_again"}


def test_no_plan_for_cuda_graphs_makes_their_layers_again() -> None:
    """The best was one in four layers made again, which Megatron-Core refuses beside graphs."""
    fix = {"vpp": 2, "mbs": 2, "dp": 8, "tp": 2}
    found = plan("bloom-1b7", "dgx-a100-80gb", 32, devices=32, seq=2048, stack=GRAPHS, fix=fix, top=50)
    assert all(entry.layout.recompute != "full" for entry in found.entries)


def test_no_plan_for_megatron_core_puts_stages_among_experts_of_other_copies() -> None:
    """On nodes of two devices the order tp-pp-dp would be among the best, were it not refused."""
    cluster = load_cluster("dgx-h100").model_copy(update={"nodes": 16, "devices_per_node": 2})
    of_experts = []
    for stack in (MEGATRON, MEGATRON.model_copy(update={"stops_at": ()})):
        found = plan("mixtral-8x7b", cluster, 64, seq=4096, stack=stack, fix={"pp": 4}, top=200)
        apart = (entry.layout for entry in found.entries if entry.layout.placement[-1] != "pp")
        of_experts.append([layout for layout in apart if layout.size("edp") != layout.dp])
    assert not of_experts[0] and of_experts[1]
