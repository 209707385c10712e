"""What some software's own checks refuse is refused before, and no plan offers it."""

from __future__ import annotations

import pytest

from trimaran.api import plan, workload_of
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations

NAMES = ("megatron-core", "torchtitan", "deepspeed", "trimaran")
MEGATRON, TORCHTITAN, DEEPSPEED, TRIMARAN = (load_stack(name) for name in NAMES)
CLUSTER = load_cluster("dgx-h100").model_copy(update={"nodes": 512})
STOPS = {
    "delayed_recompute", "biased_slices", "whole_experts", "experts_over_copies", "stages_among_experts",
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "model", "stack", "rules"),
    [
        ("dp8,recompute-layernorm+moe_act,fp8", "qwen3-30b-a3b", MEGATRON, {"delayed_recompute"}),
        ("dp8,recompute-layernorm+moe_act,mxfp8", "qwen3-30b-a3b", MEGATRON, set()),
        ("dp8,recompute-layernorm+moe_act,bf16", "qwen3-30b-a3b", MEGATRON, set()),
        ("dp8,recompute-mlp,fp8", "llama3-8b", MEGATRON, set()),
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


def test_no_plan_for_megatron_core_puts_stages_among_experts_of_other_copies() -> None:
    """On nodes of two devices the order tp-pp-dp would be among the best, were it not refused."""
    cluster = load_cluster("dgx-h100").model_copy(update={"nodes": 16, "devices_per_node": 2})
    of_experts = []
    for stack in (MEGATRON, MEGATRON.model_copy(update={"stops_at": ()})):
        found = plan("mixtral-8x7b", cluster, 64, seq=4096, stack=stack, fix={"pp": 4}, top=200)
        apart = (entry.layout for entry in found.entries if entry.layout.placement[-1] != "pp")
        of_experts.append([layout for layout in apart if layout.size("edp") != layout.dp])
    assert not of_experts[0] and of_experts[1]
