"""Runs that a stack or a cluster is not known to do are answered with a note, impossible ones are refused."""

from __future__ import annotations

import csv
import io
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from table_text import table_text
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate, time_many
from trimaran.cost.fit.fit_rows import fit_rows
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.table.predict_table import PredictedRow, predict_table, score_groups
from trimaran.files.catalogue import catalogue_names, load_cluster, load_model, load_stack
from trimaran.files.row_table import packaged_table, packaged_tables, parse_table
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import odd_but_possible
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import FOLDED
from trimaran.nouns.workload import Workload
from trimaran.report.predicted import told_once

BLOOM = next(m for m in packaged_table().measurements if m.cluster == "jean-zay-a100-80gb" and m.pp == 12 and m.mem_gib)
SMALL = Model(layers=12, hidden=768, heads=12, vocab=50257, max_positions=1024)


def answer(**cells: object) -> PredictedRow:
    """The answer to a row of document 004 with some cells changed."""
    row = BLOOM.model_copy(update={"devices": None, "nodes": None, "comparable_group": None} | cells)
    (answered,) = predict_table(parse_table(table_text([row]), "edited"))
    return answered


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"layers": 78, "pp": 12}, "layers 78 do not split evenly over PP 12"),
        ({"pp": 12, "schedule": "interleaved", "vpp": 2}, "schedule interleaved is not one of"),
        ({"pp": 12, "schedule": "1f1b", "vpp": 2}, "schedule interleaved is not one of"),
        ({"pp": 12, "schedule": "interleaved", "vpp": 1}, "read as 1f1b"),
        ({"pp": 12, "schedule": "zero_bubble"}, "schedule zero_bubble is not one of"),
        ({"pp": 12, "schedule": "dualpipev"}, "schedule dualpipev is not one of"),
        ({"zero_stage": 2}, "ZeRO stage 2 is not one of"),
        ({"zero_stage": 0, "dp_kind": "fully_sharded"}, "read as 3"),
        ({"precision": "bf16_pure"}, "precision bf16_pure is not one of"),
        ({"recompute": "selective"}, "recompute selective is not one of"),
        ({"gbs": 2050, "dp": 8, "mbs": 4}, "global batch 2050 is not a multiple of DP 8 x micro-batch 4"),
        ({"gbs": 8, "dp": 8, "mbs": 4}, "global batch 8 is not a multiple of DP 8 x micro-batch 4"),
        ({"dp": 512}, "but the cluster has 416"),
        ({"stack": "gpipe"}, "gpipe does TP 1 only"),
        ({"stack": "torch-fsdp", "dp_kind": "all_reduce"}, "is not known to torch-fsdp"),
        ({"cluster": "jean-zay-v100-32gb", "precision": "bf16"}, "is not one that V100"),
    ],
)
def test_what_the_software_is_not_known_to_do_is_answered_with_a_note(cells: dict[str, object], says: str) -> None:
    answered = answer(**cells)
    assert answered.error is None and answered.estimate is not None
    assert says.lower() in answered.cells()["predicted_note"].lower()
    assert answered.estimate.sec_per_it > 0 and math.isfinite(answered.estimate.sec_per_it)


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"tp": 5}, "is not a multiple of TP 5"),
        ({"layers": 8, "pp": 12}, "12 stages, but the model has 8 layers"),
        ({"devices": 100}, "but devices is 100"),
        ({"heads": 88}, "is not a multiple of heads 88"),
    ],
)
def test_what_cannot_be_is_refused_with_both_numbers(cells: dict[str, object], says: str) -> None:
    refused = answer(**cells)
    assert refused.estimate is None and says in (refused.error or "")
    assert refused.cells()["predicted_note"] == ""


def test_an_ordinary_run_has_no_note() -> None:
    assert answer().cells()["predicted_note"] == ""


def test_a_row_that_states_no_micro_batch_is_answered_for_one_sequence_and_neither_scored_nor_learned_from() -> None:
    alike = [BLOOM, BLOOM.model_copy(update={"mbs": 1})]
    table = parse_table(table_text(alike), "t")
    lines, text = list(csv.DictReader(io.StringIO(table_text(alike)))), io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]))
    writer.writeheader()
    writer.writerows([lines[0], lines[1] | {"mbs": ""}])
    without = parse_table(text.getvalue(), "t")
    (_, unstated), (_, known) = predict_table(without), predict_table(table)
    assert unstated.cells() | {"predicted_note": ""} == known.cells() | {"predicted_note": ""}
    assert "mbs is empty: counted as 1, and not scored" in unstated.cells()["predicted_note"]
    assert unstated.record()["mbs"] == 1
    assert score_groups(predict_table(without)) == score_groups(predict_table(table)[:1])
    assert len(without.measurements) == 1


@pytest.mark.parametrize(
    ("differs", "runs"),
    [({"notes": "again"}, 1), ({"seq_len": 4096}, 2), ({"optimizer": "sgd"}, 2)],
)
def test_rows_are_repeats_of_one_run_where_they_ask_the_same_in_other_words(
    differs: dict[str, object], runs: int
) -> None:
    rows = [BLOOM, BLOOM.model_copy(update={**differs, "sec_per_it": 100.0})]
    total = score_groups(predict_table(parse_table(table_text(rows), "t")))[-1]
    assert total.time is not None and total.time.rows == runs


def test_torchtitans_own_pipelines_run_as_many_micro_batches_as_stages_and_two_chunks() -> None:
    row = BLOOM.model_copy(
        update={
            "stack": "torchtitan", "cluster": "dgx-h100", "dp": 8, "tp": 8, "pp": 8, "vpp": 1, "gbs": 256,
            "zero_stage": 3, "dp_kind": "fully_sharded", "schedule": "interleaved", "recompute": "full",
            "devices": 512, "nodes": 64,
            "devices_per_node": 8, "layers": 126, "hidden": 16384, "ffn_hidden": 53248, "heads": 128, "kv_heads": 8,
            "seq_len": 8192, "vocab": 128256, "mbs": 4,
        }
    )  # fmt: skip
    (line,) = csv.DictReader(io.StringIO(table_text([row])))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(line))
    writer.writeheader()
    writer.writerows([line, line | {"mbs": ""}, line | {"mbs": "", "schedule": "1f1b"}])
    stated, unstated, plain = predict_table(parse_table(text.getvalue(), "t"))
    assert stated.estimate is not None and stated.estimate == unstated.estimate
    assert "mbs is empty: counted as 4, and not scored" in unstated.cells()["predicted_note"]
    assert "read as interleaved with 2, as the software has it by itself" in unstated.cells()["predicted_note"]
    assert plain.estimate is not None and plain.estimate.sec_per_it > 1.1 * stated.estimate.sec_per_it


@pytest.mark.proof
def test_every_packaged_row_that_ran_is_answered() -> None:
    rows = [row for name in packaged_tables() for row in predict_table(packaged_table(name))]
    ran = [row for row in rows if row.row.measurement and row.row.measurement.status == "ok"]
    assert not [row.error for row in ran if row.error]


def test_a_fit_uses_odd_rows_and_says_which() -> None:
    rows = [m for m in packaged_table().measurements if m.cluster == BLOOM.cluster and m.pp == 12 and m.quality == "ok"]
    rows = [row for row in rows if row.sec_per_it and row.status == "ok"][:3]
    odd = [row.model_copy(update={"schedule": "zero_bubble"}) for row in rows]
    fitted = fit_rows([*rows, *odd])
    assert fitted.rows == 2 * len(rows)
    (told,) = told_once(fitted.notes)
    assert told.startswith(f"row {len(rows) + 1} and 2 more: schedule zero_bubble")


def test_processes_that_share_a_node_of_one_cpu_are_slower_than_nodes_of_their_own() -> None:
    alone = next(m for m in packaged_table("fugaku_124m").measurements if m.devices == 4 and m.dp == 4)
    shared = alone.model_copy(update={"nodes": 1, "devices_per_node": 4, "devices": 1})
    table = parse_table(table_text([alone, shared]), "edited")
    one, other = (row.estimate for row in predict_table(table))
    assert one and other and other.sec_per_it > 2 * one.sec_per_it


@given(
    stack=st.sampled_from(catalogue_names("stacks")),
    cluster=st.sampled_from(["jean-zay-v100-32gb", "aws-p3-2xlarge", "fugaku-a64fx", "dgx-h100"]),
    model=st.sampled_from([SMALL, load_model("llama3-8b"), load_model("gpt3-xl"), load_model("llama2-70b")]),
    gbs=st.integers(1, 700),
    fields=st.fixed_dictionaries(
        {
            "dp": st.integers(1, 40),
            "tp": st.sampled_from([1, 2, 3, 4, 8, 16]),
            "pp": st.integers(1, 30),
            "vpp": st.integers(1, 4),
            "mbs": st.integers(1, 12),
            "zero_stage": st.integers(0, 3),
            "dp_kind": st.sampled_from(["all_reduce", "parameter_server", "fully_sharded"]),
            "recompute": st.sampled_from(["none", "selective", "full"]),
            "precision": st.sampled_from(["fp32", "fp16", "bf16", "bf16_pure"]),
            "schedule": st.sampled_from(["none", "gpipe", "1f1b", "interleaved", "zero_bubble", *FOLDED]),
            "sequence_parallel": st.booleans(),
        }
    ),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_possible_has_a_finite_time_and_memory(
    stack: str, cluster: str, model: Model, gbs: int, fields: dict[str, object]
) -> None:
    layout = Layout.model_validate(fields)
    workload = Workload(model=model, seq_len=1024, global_batch=gbs)
    case = Case.of(workload, load_cluster(cluster), load_stack(stack))
    try:
        odd_but_possible(layout, workload, case.cluster, case.stack)
    except TrimaranError:
        assume(False)
    answered = estimate(case, layout)
    figures = [answered.sec_per_it, answered.mem_gib, answered.reported_mem_gib]
    assert all(math.isfinite(figure) and figure > 0 for figure in figures), (layout, figures)
    assert min(answered.time.model_dump().values()) >= -1e-12, answered.time
    # the parts are those of the stage that sets the pace, which may have the loss alone
    assert answered.time.forward > 0 or 0 in answered.stage_split, answered.time
    assert sum(answered.stage_split) == model.layers


@pytest.mark.parametrize("text", ["dp4,mbs8", "dp2,pp4,mbs4,1f1b", "dp2,pp3,vpp2,mbs4,interleaved", "pp4,mbs4,gpipe"])
def test_a_batch_that_does_not_divide_takes_between_those_that_do(text: str) -> None:
    layout = parse_layout(text)
    workload = Workload(model=SMALL, seq_len=1024, global_batch=96)
    case = Case.of(workload, load_cluster("dgx-a100-80gb"), load_stack("megatron"))
    grid = LayoutGrid.from_layouts([layout], workload, case.stack)
    batches = np.arange(96, 193, 4)
    seconds = [float(time_many(case, grid.with_global_batch([batch]))[0]) for batch in batches]
    assert seconds == sorted(seconds) or max(np.diff(seconds).min() * -1, 0.0) < 0.02 * seconds[0]
    assert seconds[0] < seconds[len(seconds) // 2] < seconds[-1]


def test_key_value_heads_fewer_than_tp_are_held_whole_by_every_rank() -> None:
    llama = load_model("llama3-8b")
    workload = Workload(model=llama, seq_len=2048, global_batch=64)
    case = Case.of(workload, load_cluster("dgx-h100"), load_stack("megatron"))
    notes = odd_but_possible(Layout(dp=1, tp=16), workload, case.cluster, case.stack)
    assert any("kv_heads 8" in note for note in notes)
    eight, sixteen = (estimate(case, parse_layout(f"dp1,tp{tp},mbs16,bf16")).time.forward for tp in (8, 16))
    assert 0.5 * eight < sixteen < eight


def test_fsdp_that_keeps_weights_gathered_is_written_and_read_back() -> None:
    layout = Layout(dp=8, dp_kind="fully_sharded", zero_stage=2)
    assert parse_layout(layout.label()) == layout
    assert parse_layout("dp8,fsdp").zero_stage == 3


def test_fsdp_that_keeps_weights_gathered_holds_them_whole() -> None:
    """SHARD_GRAD_OP gathers 2 bytes a weight of all layers by the end of a forward, where FSDP holds two of them."""
    workload = Workload(model=load_model("llama3-8b"), seq_len=2048, global_batch=8)
    case = Case.of(workload, load_cluster("dgx-h100"), load_stack("torch-fsdp"))
    kept, resharded = (estimate(case, parse_layout(f"dp8,mbs1,fsdp{word},bf16")).memory[0] for word in (",zero2", ""))
    of_layers = 30 * workload.model.layer_parameters * 2 / 2**30
    assert kept.weights - resharded.weights == pytest.approx(of_layers, rel=1e-6)
    assert kept.activations == resharded.activations
