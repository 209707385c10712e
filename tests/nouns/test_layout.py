"""Every rule of validity names both numbers; splits and notation are exact."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.axes import DEGREES
from trimaran.layout.layout import Layout, resolve_split
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import RULES, check_layout, violations
from trimaran.layout.stages import even_split, weighted_split
from trimaran.nouns.model import Model, padded_vocab
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import RampUp, Workload

BLOOM = load_model("bloom-prequel-181b")
JEAN_ZAY = load_cluster("jean-zay-a100-80gb")
MEGATRON = load_stack("megatron-deepspeed")
TRIMARAN = load_stack("trimaran")


def bloom(gbs: int = 2048, ramp: RampUp | None = None) -> Workload:
    return Workload(model=BLOOM, seq_len=2048, global_batch=gbs, ramp_up=ramp)


@pytest.mark.parametrize(
    ("rule", "text", "stack", "numbers"),
    [
        ("devices", "dp64,tp8,pp12", "megatron-deepspeed", ("6144", "416")),
        ("global_batch", "dp6,tp8,pp8,mbs2", "megatron-deepspeed", ("2048", "12", "2052")),
        ("heads", "tp3", "megatron-deepspeed", ("64", "3")),
        ("ffn_hidden", "tp3", "megatron-deepspeed", ("57344", "3")),
        ("hidden", "tp3", "megatron-deepspeed", ("14336", "3")),
        ("even_stages", "pp48", "megatron-deepspeed", ("72", "48")),
        ("stages", "pp96", "trimaran", ("72", "96")),
        ("stages", "pp2,split30-40", "trimaran", ("30-40", "72")),
        ("schedule", "pp2,vpp2,interleaved", "megatron-deepspeed", ("interleaved",)),
        ("chunks", "pp2,interleaved", "megatron", ("VPP", "1")),
        ("zero_stage", "dp2,zero2", "megatron-deepspeed", ("2", "0, 1")),
        ("stack", "dp2,ps", "megatron-deepspeed", ("parameter_server",)),
        ("stack", "tp2,sp", "megatron-deepspeed", ("sequence parallelism",)),
        ("sequence_parallel", "tp1,sp", "megatron", ("1",)),
        ("precision", "bf16", "megatron", ("bf16", "fp16")),
    ],
)
def test_a_broken_rule_is_named_with_its_numbers(rule: str, text: str, stack: str, numbers: tuple[str, ...]) -> None:
    cluster = load_cluster("jean-zay-v100-32gb") if rule == "precision" else JEAN_ZAY
    found = {v.rule: v.sentence for v in violations(parse_layout(text), bloom(), cluster, load_stack(stack))}
    assert rule in found
    assert all(number in found[rule] for number in numbers), found[rule]


def test_key_value_heads_bound_tensor_parallelism() -> None:
    workload = Workload(model=load_model("llama3-8b"), seq_len=4096, global_batch=64)
    found = {v.rule: v.sentence for v in violations(Layout(tp=16), workload, JEAN_ZAY, TRIMARAN)}
    assert "kv_heads 8" in found["kv_heads"] and "TP 16" in found["kv_heads"]


def test_every_step_of_the_ramp_up_must_divide() -> None:
    ramp = RampUp(start=32, increment=32, samples=1_000_000)
    assert not list(violations(parse_layout("dp4,tp8,pp12,mbs8"), bloom(ramp=ramp), JEAN_ZAY, MEGATRON))
    (broken,) = list(violations(parse_layout("dp8,tp8,pp6,mbs8"), bloom(ramp=ramp), JEAN_ZAY, MEGATRON))
    assert broken.rule == "ramp_up" and "32" in broken.sentence and "64" in broken.sentence


def test_interleaving_needs_micro_batches_in_multiples_of_the_stages() -> None:
    layout = Layout(pp=3, vpp=2, tp=8)
    found = {v.rule for v in violations(layout, bloom(2048), JEAN_ZAY, load_stack("megatron"))}
    assert "micro_batches" in found


@pytest.mark.parametrize("text", ["dp8,tp4,pp12,mbs2", "dp6,tp8,pp8,mbs4,zero1,recompute-full,fp16"])
def test_layouts_that_were_really_run_are_valid(text: str) -> None:
    gbs = 2016 if "dp6" in text else 2048
    check_layout(parse_layout(text), bloom(gbs), JEAN_ZAY, MEGATRON)


def test_degrees_that_are_no_powers_of_two_work() -> None:
    fugaku = Workload(model=Model(layers=48, hidden=7176, heads=78, vocab=50257), seq_len=2048, global_batch=1536)
    check_layout(parse_layout("dp2,tp6,pp48"), fugaku, load_cluster("fugaku-a64fx"), load_stack("megatron-cpu"))
    for dp, gbs in ((5, 2045), (9, 2043)):
        check_layout(parse_layout(f"dp{dp},tp8,pp4"), bloom(gbs), JEAN_ZAY, MEGATRON)


def test_trimaran_splits_seventy_two_layers_over_forty_eight_stages() -> None:
    split = resolve_split(parse_layout("dp8,pp48"), bloom(), TRIMARAN)
    assert len(split) == 48 and sum(split) == 72 and min(split) >= 1 and split[-1] == min(split)


def test_bloom_as_trained_has_its_ends_one_layer_lighter() -> None:
    workload = Workload(model=load_model("bloom-176b"), seq_len=2048, global_batch=2048)
    layout = parse_layout("dp8,tp4,pp12,mbs2,zero1,recompute-full,fp16")
    check_layout(layout, workload, JEAN_ZAY, MEGATRON)
    split = resolve_split(layout, workload, MEGATRON)
    assert split == (5, *([6] * 10), 5)
    check_layout(layout.model_copy(update={"stage_split": split}), workload, JEAN_ZAY, MEGATRON)


def test_the_head_weighs_like_layers_in_the_split() -> None:
    assert weighted_split(8, 2, 0.0) == (4, 4)
    assert weighted_split(8, 2, 1.7) == (5, 3)
    assert weighted_split(3, 1, 9.0) == (3,)
    with pytest.raises(TrimaranError, match="layers 3 cannot fill 4"):
        weighted_split(3, 4, 0.0)


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0, 10))
def test_splits_hold_all_layers_and_no_stage_is_empty(layers: int, stages: int, head: float) -> None:
    if stages > layers:
        return
    for split in (weighted_split(layers, stages, head), even_split(layers, stages)):
        assert len(split) == stages and sum(split) == layers and min(split) >= 1
    weighted, even = weighted_split(layers, stages, head), even_split(layers, stages)

    def slowest(split: tuple[int, ...]) -> float:
        return max(*split[:-1], split[-1] + head) if stages > 1 else split[-1] + head

    assert slowest(weighted) <= slowest(even) + 1e-9


@given(
    dp=st.integers(1, 64),
    tp=st.integers(1, 16),
    pp=st.integers(1, 16),
    mbs=st.integers(1, 8),
    zero_stage=st.integers(0, 2),
    recompute=st.sampled_from(["none", "selective", "full"]),
    precision=st.sampled_from(["fp32", "fp16", "bf16", "bf16_pure"]),
    placement=st.permutations(["tp", "pp", "dp"]),
)
def test_the_short_notation_reads_back(**fields: object) -> None:
    layout = Layout.model_validate(
        {**fields, "placement": tuple(fields["placement"])}  # type: ignore[arg-type]
    )
    assert parse_layout(layout.label()) == layout


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.permutations(["tp", "pp", "dp"]))
def test_ranks_are_a_permutation_of_the_coordinates(dp: int, tp: int, pp: int, placement: list[str]) -> None:
    layout = Layout.model_validate({"dp": dp, "tp": tp, "pp": pp, "placement": tuple(placement)})
    places = {tuple(layout.coordinate(axis, rank) for axis in DEGREES) for rank in range(layout.devices)}
    assert places == set(product(range(dp), range(tp), range(1), range(pp)))


def test_vocabulary_is_padded_to_128_times_tp() -> None:
    assert padded_vocab(50257, 1) == 50304
    assert padded_vocab(50257, 4) == 50688
    assert padded_vocab(250880, 8) == 250880


@pytest.mark.parametrize(
    "text",
    [
        "dp2,xx3",
        "dp-1",
        "dp0",
        "mbs=0",
        "cp0",
        "split",
        "offload",
        "",
        " ",
        "dp2,dp4",
        "dp2,tp2,tp2",
        "zero1,fsdp",
    ],
)
def test_a_layout_that_is_not_understood_says_so_in_one_line(text: str) -> None:
    with pytest.raises(TrimaranError) as caught:
        layout = parse_layout(text)
        check_layout(layout, bloom(), JEAN_ZAY, TRIMARAN)
    assert "\n" not in str(caught.value)


def test_every_rule_has_a_name_of_its_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
