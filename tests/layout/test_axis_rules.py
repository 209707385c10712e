"""Rules on hybrid sharding, parts of sequences and experts: what they refuse, and what each is of."""

from __future__ import annotations

import pytest

from trimaran.api import workload_of
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import odd_but_possible, violations
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

CLUSTER = load_cluster("dgx-h100").model_copy(update={"nodes": 512})
NAMES = ("megatron-core", "torchtitan", "deepspeed", "trimaran")
MEGATRON, TORCHTITAN, DEEPSPEED, TRIMARAN = (load_stack(name) for name in NAMES)
CONTEXT_KINDS = ("ring", "all_gather", "ulysses")
ALLTOALL = Stack(name="any", precisions=("bf16",), expert_parallel=True, dispatchers=("alltoall",))


def broken(layout: str, stack: Stack, model: str = "llama3-8b", seq_len: int = 8192) -> dict[str, str]:
    """The rules that a layout breaks, each with what it is of."""
    workload = workload_of(model, 512, seq=seq_len)
    parsed = parse_layout(f"{layout},bf16")
    return {violation.rule: violation.of for violation in violations(parsed, workload, CLUSTER, stack)}


@pytest.mark.parametrize(
    ("layout", "stack", "rules"),
    [
        ("dp64,shard8,fsdp", TORCHTITAN, {}),
        ("dp64,shard64,fsdp", TORCHTITAN, {}),
        ("dp64,shard8,zero1", MEGATRON, {}),
        ("dp64,shard8,zero2", TRIMARAN, {}),
        ("dp64,shard8,zero1", DEEPSPEED, {"hybrid_sharding": "software"}),
        ("dp64,shard12,fsdp", TORCHTITAN, {"shard": "arithmetic"}),
        ("dp64,shard8", TORCHTITAN, {"hybrid_sharding": "software"}),
        ("dp64,shard1,fsdp", TORCHTITAN, {"hybrid_sharding": "software"}),
        ("cp4", MEGATRON, {}),
        ("cp8,cp-ulysses", MEGATRON, {}),
        ("cp16,cp-ulysses", MEGATRON, {"context_kv_heads": "software"}),
        ("cp16,cp-ulysses,fsdp", DEEPSPEED, {}),
        ("cp8,shard1,fsdp", TORCHTITAN, {}),
        ("tp8,cp8,sp,cp-ulysses", MEGATRON, {"context_heads": "arithmetic", "context_kv_heads": "software"}),
        ("cp4,tp2,cp-ulysses", TRIMARAN, {}),
        ("cp16,cp-ulysses", TRIMARAN, {"context_kv_heads": "software"}),
        ("cp4", ALLTOALL, {"context_parallel": "software"}),
        ("cp4,cp-ulysses,fsdp", TORCHTITAN, {"context_parallel": "software"}),
        ("dp8,tp2,fsdp", TORCHTITAN, {"tensor_slices": "software"}),
        ("dp8,tp2,fsdp,sp", TORCHTITAN, {}),
        ("dp8,tp2", MEGATRON, {}),
        ("cp4", TORCHTITAN, {"whole_context": "software"}),
        ("dp8,tp2,sp", TORCHTITAN, {"whole_replicas": "software", "whole_precision": "software"}),
        ("pp2", TORCHTITAN, {"whole_precision": "software"}),
        ("dp1,tp2,sp,zero3,fsdp", TORCHTITAN, {"whole_precision": "software"}),
        ("dp1,tp2,cp2,sp,zero3,fsdp", TORCHTITAN, {}),
        ("dp8", TORCHTITAN, {}),
        ("cp3", MEGATRON, {"context_tokens": "arithmetic", "context_halves": "software"}),
        ("cp8192", MEGATRON, {"context_halves": "software", "devices": "machine"}),
        ("ep8", MEGATRON, {"experts": "arithmetic"}),
        ("ep1,etp1", MEGATRON, {}),
    ],
)
def test_layouts_break_the_rules_of_their_axes(layout: str, stack: Stack, rules: dict[str, str]) -> None:
    assert broken(layout, stack) == rules


@pytest.mark.parametrize(
    ("model", "stack", "kinds"),
    [
        ("llama3-8b", MEGATRON, {"ring", "all_gather", "ulysses"}),
        ("mistral-7b", MEGATRON, {"all_gather", "ulysses"}),
        ("gpt-oss-20b", MEGATRON, {"ulysses"}),
        ("deepseek-v2-lite", MEGATRON, {"ring"}),
        ("gpt-oss-20b", TORCHTITAN, set()),
        ("gemma2-9b", TRIMARAN, {"ulysses"}),
        ("mistral-7b", TRIMARAN, {"ring", "all_gather", "ulysses"}),
    ],
)  # fmt: skip
def test_kinds_of_context_parallelism_attend_with_what_the_software_has_them_for(
    model: str, stack: Stack, kinds: set[str]
) -> None:
    """Transformer Engine asserts that windows go by no ring, latent attention by nothing else, sinks by a2a alone."""
    layouts = {kind: f"cp4,cp-{kind},mbs1,{'fsdp' if stack is TORCHTITAN else 'zero1'}" for kind in CONTEXT_KINDS}
    refused = {kind: broken(layout, stack, model, 32768) for kind, layout in layouts.items()}
    assert {kind for kind, rules in refused.items() if not {"context_traits", "context_parallel"} & set(rules)} == kinds
    found = violations(parse_layout("cp4,mbs1,bf16"), workload_of("mistral-7b", 64, seq=32768), CLUSTER, MEGATRON)
    assert next(each.sentence for each in found if each.rule == "context_traits").startswith(
        "model.sliding_window is 4096, but over CP 4 by ring megatron-core attends without: take cp-all_gather or "
    )


def test_rows_of_what_torchtitan_does_not_do_are_predicted_with_a_note() -> None:
    workload = workload_of("llama3-8b", 512, seq=8192)
    for text, note in (("dp8,tp2,mbs1", "TP 2 without sequence parallelism"), ("cp4,mbs1", "CP 4 with ZeRO stage 0")):
        notes = odd_but_possible(parse_layout(f"{text},bf16"), workload, CLUSTER, TORCHTITAN)
        assert any(note in each for each in notes)


def test_every_sentence_names_both_numbers_and_a_way_out() -> None:
    workload = workload_of("llama3-8b", 512, seq=8192)
    for layout, numbers in (
        ("dp64,shard12,fsdp", ("12", "64")),
        ("cp3,fsdp", ("8192", "3")),
        ("cp8192,fsdp", ("8192", "2 x")),
    ):
        found = list(violations(parse_layout(f"{layout},bf16"), workload, CLUSTER, TORCHTITAN))
        sentences = [violation.sentence for violation in found if violation.rule != "devices"]
        assert sentences
        for sentence in sentences:
            assert all(number in sentence for number in numbers)
            assert ": choose" in sentence


@pytest.mark.parametrize(
    ("layout", "stack", "rules"),
    [
        ("dp8,ep8", ALLTOALL, {}),
        ("dp4,tp2,ep8,etp1", ALLTOALL, {}),
        ("dp2,cp2,tp2,ep8,etp1", MEGATRON, {}),
        ("dp4,tp2,ep8", ALLTOALL, {"expert_fold": "arithmetic"}),
        ("dp16,ep16", ALLTOALL, {"experts": "arithmetic"}),
        ("dp8,tp2,ep4,etp4", ALLTOALL, {"expert_parallel": "software"}),
        ("dp4,tp4,ep4,etp2", ALLTOALL, {"expert_parallel": "software"}),
        ("dp4,tp4,ep4,etp2", MEGATRON, {}),
        ("dp8,ep8", TRIMARAN, {}),
        ("dp8,ep8,dispatch-deepep", ALLTOALL, {"expert_parallel": "software"}),
        ("dp8,ep8,dispatch-deepep", MEGATRON, {}),
    ],
)  # fmt: skip
def test_experts_lie_as_their_number_and_the_stack_allow(layout: str, stack: Stack, rules: dict[str, str]) -> None:
    mixture = Workload.model_construct(model=load_model("mixtral-8x7b"), seq_len=4096, global_batch=96, ramp_up=None)
    found = violations(parse_layout(f"{layout},bf16"), mixture, CLUSTER, stack)
    axes = {"experts", "expert_fold", "expert_parallel"}
    assert {violation.rule: violation.of for violation in found if violation.rule in axes} == rules


@pytest.mark.parametrize(("tp", "shared", "refused"), [(2, 1, True), (4, 2, True), (2, 2, False), (4, 0, False)])
def test_shared_experts_are_cut_over_tp_evenly_or_refused(tp: int, shared: int, refused: bool) -> None:
    """Ranks had columns of different widths and trained another model in silence: whole by its 45, cut by 22 and 23."""
    model = load_model("mixtral-8x7b").model_copy(update={"moe_ffn_hidden": 45, "shared_experts": shared})
    mixture = Workload.model_construct(model=model, seq_len=4096, global_batch=96, ramp_up=None)
    found = violations(parse_layout(f"dp4,tp{tp},sp,etp1,bf16"), mixture, CLUSTER, TRIMARAN)
    said = f"shared_experts {shared} x moe_ffn_hidden 45 = {45 * shared} are not a multiple of TP {tp}"
    assert [said in each.sentence for each in found if each.rule == "experts"] == [True] * refused
