"""Cells as others print them: what says one thing alone is read, and what may say two is refused."""

from __future__ import annotations

import csv
import io

import pytest

from trimaran.cost.table.predict_table import PredictedRow, predict_table
from trimaran.files.row_nouns import nouns_of
from trimaran.files.row_table import parse_table
from trimaran.nouns.columns import BY_NAME, parse_cell
from trimaran.report.scores import csv_with_predictions

RUN = {
    "cluster": "dgx-a100-80gb", "stack": "megatron-deepspeed", "layers": "48", "hidden": "8192", "heads": "64",
    "seq_len": "2048", "vocab": "51200", "dp": "4", "tp": "8", "pp": "2", "mbs": "1", "gbs": "512", "zero_stage": "1",
    "precision": "bf16", "recompute": "full", "sec_per_it": "30.1",
}  # fmt: skip


def predicted(cluster_given: str | None = None, **cells: str) -> PredictedRow:
    run = RUN | cells
    out = io.StringIO()
    writer = csv.DictWriter(out, list(run))
    writer.writeheader()
    writer.writerow(run)
    return predict_table(parse_table(out.getvalue(), "printed"), cluster=cluster_given)[0]


def seconds(row: PredictedRow) -> float:
    assert row.estimate is not None, row.error
    return row.estimate.sec_per_it


@pytest.mark.parametrize(
    ("column", "printed", "meant"),
    [
        ("optimizer", "AdamW", "adam"),
        ("optimizer", "FusedAdam", "adam"),
        ("precision", "bfloat16", "bf16"),
        ("precision", "BF16 mixed", "bf16"),
        ("precision", "FP8-rowwise", "fp8_rowwise"),
        ("precision", "fp8 blockwise e4m3", "fp8"),
        ("dp_kind", "FSDP", "fully_sharded"),
        ("dp_kind", "parameter server", "parameter_server"),
        ("schedule", "PipeDream-Flush", "1f1b"),
        ("schedule", "Interleaved1F1B", "interleaved"),
        ("schedule", "ZB-H1", "zero_bubble"),
        ("schedule", "none", "none"),
        ("recompute", "Yes", "full"),
        ("recompute", "False", "none"),
        ("recompute", "every 2", "every-2"),
        ("dispatcher", "A2A", "alltoall"),
        ("dispatcher", "all-to-all", "alltoall"),
        ("status", "Out of memory", "oom"),
        ("status", "success", "ok"),
        ("zero_stage", "ZeRO-3", 3),
        ("gbs", "1,536", 1536),
        ("devices", "64 GPUs", 64),
        ("sec_per_it", "1200 ms", 1.2),
        ("sec_per_it", "30.1s", 30.1),
        ("mem_gib", "46,080 MiB", 45.0),
        ("tokens_per_s_per_gpu", "12,345", 12345.0),
        ("tp", "-", 1),
        ("vpp", "none", 1),
        ("dp_kind", "none", "all_reduce"),
        ("mem_gib", "n/a", None),
        ("sec_per_it", "\N{EM DASH}", None),
        ("notes", "none", "none"),
    ],
)
def test_what_others_print_is_read(column: str, printed: str, meant: object) -> None:
    assert parse_cell(BY_NAME[column], printed) == meant


@pytest.mark.parametrize(
    ("column", "printed"),
    [("seq_len", "8k"), ("vocab", "50k"), ("gbs", "4M tokens"), ("precision", "mixed"), ("tp", "8*"), ("gbs", "1,53"),
     ("sec_per_it", "3 GB"), ("mem_gib", "45 s"), ("precision", "tf32"), ("dp_kind", "HSDP"), ("optimizer", "lamb")],
)  # fmt: skip
def test_what_may_mean_two_things_or_is_not_counted_is_refused(column: str, printed: str) -> None:
    with pytest.raises(ValueError, match=f"{column} is "):
        parse_cell(BY_NAME[column], printed)


def test_a_word_that_is_read_as_another_is_told() -> None:
    assert "optimizer is 'AdamW': read as adam" in predicted(optimizer="AdamW").notes
    assert not predicted(optimizer="Adam").notes


@pytest.mark.parametrize("printed", ["OOM", "Fail (OOM)"])
def test_a_figure_that_tells_how_its_run_ended_is_its_status(printed: str) -> None:
    row = predicted(sec_per_it=printed, status="").row.measurement
    assert row is not None and (row.status, row.sec_per_it) == ("oom", None)


def test_a_figure_that_contradicts_its_status_is_not_its_status() -> None:
    row = predicted(sec_per_it="OOM", status="ok")
    assert row.row.measurement is None and seconds(row) == seconds(predicted())


@pytest.mark.parametrize("printed", ["~30", "30.1\N{PLUS-MINUS SIGN}0.2", "see below"])
def test_a_row_whose_figure_cannot_be_read_is_answered_and_not_scored(printed: str) -> None:
    row = predicted(sec_per_it=printed)
    assert seconds(row) == seconds(predicted())
    assert row.row.measurement is None and row.seconds is None
    assert any("sec_per_it is" in note and "not scored" in note for note in row.notes)


def test_an_unread_figure_does_not_hide_that_the_question_is_unread() -> None:
    assert "gbs is" in (predicted(sec_per_it="~30", gbs="1.5k").error or "")


def test_a_row_that_names_no_vocabulary_is_answered_for_gpt_2s_and_not_scored() -> None:
    row = predicted(vocab="")
    assert seconds(row) == seconds(predicted(vocab="50257")) and row.row.measurement is None
    assert "vocab is empty: counted as 50257, and not scored" in row.notes


def test_a_micro_batch_that_is_stated_stays_where_a_figure_cannot_be_read() -> None:
    """torchtitan makes as many micro-batches as stages where none is stated."""
    run = {"stack": "torchtitan", "tp": "1", "pp": "4", "dp": "16", "zero_stage": "3", "gbs": "1024"}
    assert seconds(predicted(**run, sec_per_it="~30")) == seconds(predicted(**run))


def test_nodes_alone_tell_the_devices() -> None:
    row = predicted(dp="", nodes="8")
    assert seconds(row) == seconds(predicted())
    assert "dp and devices are empty: counted as all 64 of 8 nodes of dgx-a100-80gb" in row.notes
    assert "dp is empty" in (predicted(dp="").error or "")


@pytest.mark.parametrize("blank", ["-", "--", "n/a", "\N{EN DASH}"])
def test_a_dash_that_is_written_reads_back_as_a_blank(blank: str) -> None:
    table = csv_with_predictions(tuple(RUN), [predicted(zero_stage=blank)])
    assert parse_table(table, "read back").measurements[0].zero_stage == 0


def test_a_cluster_that_its_author_alone_knows_gives_way_to_the_one_that_is_given() -> None:
    row = predicted("dgx-a100-80gb", cluster="our pod")
    assert seconds(row) == seconds(predicted())
    assert "cluster 'our pod' is not in the catalogue: read as dgx-a100-80gb" in row.notes
    assert seconds(predicted("dgx-h100")) == seconds(predicted())
    assert "our pod" in (predicted(cluster="our pod").error or "")


def test_a_model_of_hugging_face_is_read_by_its_name() -> None:
    shape = dict.fromkeys(("layers", "hidden", "heads", "vocab"), "")
    named, plain = (predicted(**shape, model=name) for name in ("meta-llama/Llama-2-70b-hf", "llama2-70b"))
    assert seconds(named) == seconds(plain)
    assert "no/such/folder" in (predicted(**shape, model="no/such/folder").error or "")


@pytest.mark.parametrize("column, printed", [("stack", "Megatron-DeepSpeed"), ("cluster", "DGX_A100 80GB")])
def test_names_of_the_catalogue_count_however_their_words_are_set_apart(column: str, printed: str) -> None:
    assert seconds(predicted(**{column: printed})) == seconds(predicted())


@pytest.mark.parametrize(
    ("stack", "cells", "counted"),
    [
        ("megatron", {"notes": "with sequence parallelism"}, True),
        ("megatron", {"system": "Megatron-LM, tensor + sequence-parallel"}, True),
        ("megatron", {"notes": "no sequence parallelism"}, False),
        ("megatron", {}, False),
        ("megatron-core", {}, True),
        ("megatron-core", {"notes": "without sequence parallelism"}, False),
        ("megatron-core", {"notes": "sequence parallelism", "tp": "1"}, False),
        ("megatron", {"notes": "DeepSpeed-Ulysses sequence parallelism"}, False),
    ],
)
def test_a_rows_words_say_whether_ranks_share_the_sequence(stack: str, cells: dict[str, str], counted: bool) -> None:
    row = predicted(stack=stack, **cells).row.measurement
    assert row is not None and nouns_of(row).layout.sequence_parallel is counted


@pytest.mark.parametrize(
    ("stack", "cells", "etp"),
    [
        ("megatron-core", {"tp": "4", "ep": "8"}, 4),  # as TP
        ("megatron-core", {"tp": "4", "ep": "64", "pp": "4"}, 1),  # 64 ranks are too few for 64 x 4
        ("torchtitan", {"tp": "4", "ep": "8"}, 1),  # as torchtitan has it by itself
        ("torchtitan", {"tp": "4", "ep": "8", "etp": "4"}, 4),
    ],
)
def test_experts_whose_cut_is_left_out_are_cut_as_the_ranks_allow(stack: str, cells: dict[str, str], etp: int) -> None:
    run = {"cluster": "dgx-h100", "model": "qwen3-235b-a22b", "devices": "256", "dp": "", "pp": "1", "gbs": "2048"}
    shape = dict.fromkeys(("layers", "hidden", "heads", "vocab"), "")
    row = predicted(stack=stack, **shape, **(run | cells))
    assert row.estimate is not None, row.error
    assert row.row.measurement is not None and nouns_of(row.row.measurement).layout.size("etp") == etp
