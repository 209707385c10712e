"""Recompute by module: what a layer keeps and what runs again, by Megatron-Core's names for parts of a layer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate, estimate_many
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.shapes import kept_bytes
from trimaran.cost.table.predict_table import predict_table
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.files.row_table import parse_table
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import check_layout
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.recompute import MODULES as WORDS
from trimaran.nouns.recompute import RECOMPUTES
from trimaran.nouns.workload import Workload
from trimaran.operators.layer import layer_operators
from trimaran.operators.modules import MODULES
from trimaran.operators.operator import Part
from trimaran.planner.planner import plan_with
from trimaran.planner.search.settings import settings_from

GPT = load_model("gpt3-6b7")
WORKLOAD = Workload(model=GPT, seq_len=2048, global_batch=64)
CASE = Case.of(WORKLOAD, load_cluster("dgx-a100-80gb"), load_stack("megatron"))


def kept(word: str) -> float:
    """Bytes that one layer keeps, over s b h."""
    layout = Layout(recompute=word, precision="bf16")
    grid = LayoutGrid.from_layouts([layout], WORKLOAD, CASE.stack)
    return float(kept_bytes(CASE, grid).partly[0]) / (WORKLOAD.seq_len * GPT.hidden)


# Of the 34 + 5 a s / h bytes of Korthikanti et al., arXiv 2205.05198, eq. (1): scores, softmax and their dropout; the
# inputs of qkv and of the MLP; the inputs of GELU and of the MLP's second product.
SCORES, NORMED, INNER = 5 * GPT.heads * WORKLOAD.seq_len / GPT.hidden, 2 + 2, 8 + 8


@pytest.mark.parametrize(
    ("word", "freed"),
    [
        ("none", 0.0),
        ("core_attn", SCORES),
        ("selective", SCORES),
        ("layernorm", NORMED),
        ("mlp", INNER),
        ("layernorm+mlp", NORMED + INNER),
        ("core_attn+layernorm+mlp", SCORES + NORMED + INNER),
        ("moe+moe_act+shared_experts+mla_up_proj", 0.0),
    ],
)
def test_a_layer_keeps_what_the_paper_counts_but_for_what_the_modules_make_again(word: str, freed: float) -> None:
    assert kept(word) == pytest.approx(34 + SCORES - freed)


def test_every_module_is_described_and_covers_operators_of_a_layer() -> None:
    assert set(MODULES) == set(WORDS)
    deepseek = load_model("deepseek-v3")
    models = (GPT, deepseek, deepseek.model_copy(update={"shared_gate": True}))
    names = {operator.name for model in models for operator in layer_operators(Part.whole(model, 2048))}
    assert {name for module in MODULES.values() for name in module.operators} <= names


def seconds_and_gib(text: str) -> tuple[float, float, float]:
    found = estimate(CASE, parse_layout(text))
    return found.time.recompute, found.time.tp, found.memory[0].activations


def test_the_core_of_attention_is_what_megatrons_selective_means() -> None:
    assert seconds_and_gib("tp4,bf16,recompute-core_attn") == seconds_and_gib("tp4,bf16,recompute-selective")


def test_more_modules_run_more_again_and_keep_less() -> None:
    words = ["none", "layernorm", "core_attn+layernorm", "core_attn+layernorm+mlp", "full"]
    found = [seconds_and_gib(f"tp4,mbs4,bf16,recompute-{word}") for word in words]
    for less, more in itertools.pairwise(found):
        assert more[0] > less[0] and more[2] < less[2]


def test_an_mlp_that_runs_again_sums_its_output_again() -> None:
    (_, once, _), (_, again, _) = (seconds_and_gib(f"tp4,mbs4,bf16,recompute-{word}") for word in ("none", "mlp"))
    # four sums a layer and micro-batch, and a fifth; the ends' own stay
    assert once * 1.24 < again < once * 1.25


def test_a_grid_of_many_words_answers_as_each_alone() -> None:
    words = [*RECOMPUTES[::9], "full", "none", "mlp"]
    layouts = [Layout(tp=2, recompute=word, precision="bf16") for word in words]
    many = estimate_many(CASE, LayoutGrid.from_layouts(layouts, WORKLOAD, CASE.stack))
    alone = [estimate(CASE, layout) for layout in layouts]
    assert np.array_equal(many.sec_per_it, [each.sec_per_it for each in alone])
    assert np.array_equal(many.mem_gib, [each.mem_gib for each in alone])


def test_notation_and_cells_take_modules_in_any_order() -> None:
    layout = parse_layout("tp2,recompute-moe_act+core_attn+layernorm")
    assert layout.recompute == "core_attn+layernorm+moe_act" and parse_layout(layout.label()) == layout
    with pytest.raises(TrimaranError, match="not understood"):
        parse_layout("recompute-core_attn+warp")
    with pytest.raises(ValueError, match=r"modules joined by \+: core_attn"):
        Layout(recompute="warp")


@pytest.mark.parametrize(
    ("cell", "word", "every"),
    [
        ("every-2", "full", 2),
        ("core_attn+moe_act+layernorm", "core_attn+layernorm+moe_act", 1),
        ("MLP", "mlp", 1),
        ("unknown", "none", 1),
    ],
)
def test_a_table_says_what_is_recomputed_in_operators_terms(cell: str, word: str, every: int) -> None:
    text = "cluster,stack,model,seq_len,mbs,gbs,dp,recompute,precision\n"
    tables = [f"{text}dgx-h100,torchtitan,llama3-8b,8192,1,16,8,{stated},bf16\n" for stated in (cell, "none")]
    (row,), (plain,) = (predict_table(parse_table(table, "t")) for table in tables)
    assert row.estimate and plain.estimate, row.error
    same = Layout(dp=8, recompute=word, recompute_every=every, precision="bf16")
    case = Case.of(Workload(model=load_model("llama3-8b"), seq_len=8192, global_batch=16),
                   load_cluster("dgx-h100"), load_stack("torchtitan"))  # fmt: skip
    assert row.estimate.sec_per_it == estimate(case, same).sec_per_it
    assert (row.estimate.mem_gib < plain.estimate.mem_gib) == (cell != "unknown")


def test_an_unknown_word_of_a_table_gets_the_known_ones() -> None:
    (row,) = parse_table("model,seq_len,mbs,gbs,recompute\nllama3-8b,8192,1,16,norms acts\n", "t").rows
    assert (
        row.error and "recompute is 'norms acts'" in row.error and "core_attn" in row.error and "every-2" in row.error
    )


def test_the_planner_searches_the_modules_that_a_stack_has() -> None:
    has = ("none", "core_attn+layernorm", "core_attn+layernorm+mlp", "full")
    stack = CASE.stack.model_copy(update={"recomputes": has})
    case = Case.of(WORKLOAD, CASE.cluster, stack)
    found = plan_with(case, settings_from(devices=8, fixed={"tp": 1, "pp": 1, "mbs": 4}, top=20))
    assert {entry.layout.recompute for entry in found.entries} & set(has[1:3])
    assert {entry.layout.recompute for entry in found.entries} <= set(has)


def test_a_stack_that_lacks_the_modules_refuses_before_anything_starts() -> None:
    layout = parse_layout("recompute-mlp,bf16")
    with pytest.raises(TrimaranError, match="recompute mlp is not one of megatron's none, selective, full, or of modu"):
        check_layout(layout, WORKLOAD, CASE.cluster, CASE.stack)


def test_a_stack_that_has_modules_has_them_in_any_company() -> None:
    core = load_stack("megatron-core")
    assert core.can_recompute("layernorm+mlp") and core.can_recompute("moe") and core.can_recompute("full")
    assert not core.can_recompute("core_attn") and not core.can_recompute("layernorm+shared_experts")
    assert all(load_stack("trimaran").can_recompute(word) for word in RECOMPUTES)


def test_modules_that_run_again_are_launched_again() -> None:
    """By a host that takes a millisecond an operator, which is all that counts: two norms, two launches each."""
    slow = CASE.calibrated(CASE.calibration.model_copy(update={"op_us": 1000.0}))
    found = estimate(slow, Layout(mbs=1, recompute="layernorm", precision="bf16"))
    micro_batches, launches = 64, 2 * 2
    assert found.time.recompute == pytest.approx(micro_batches * GPT.layers * launches * 1e-3, rel=1e-3)


def test_half_of_an_odd_number_of_layers_is_rounded_up_where_each_stage_counts_its_own() -> None:
    """Of 5 layers of each stage Megatron-Core makes 3 again, as many as its exporter writes."""
    workload, stack = (
        Workload(model=load_model("llama3-70b"), seq_len=8192, global_batch=64),
        load_stack("megatron-core"),
    )
    case = Case.of(workload, load_cluster("dgx-h100"), stack)
    whole, half = (
        estimate(case, parse_layout(f"dp1,tp8,pp16,mbs1,zero1,sp,recompute-full{every},bf16")) for every in ("", "2")
    )
    assert half.time.recompute == pytest.approx(0.6 * whole.time.recompute)
    plain = estimate(case, parse_layout("dp1,tp8,pp16,mbs1,zero1,sp,bf16"))
    kept = [each.memory[0].activations for each in (plain, half, whole)]
    assert kept[0] > kept[1] > kept[2]
