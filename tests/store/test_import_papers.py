"""Tables as papers print them: their headings, their units, and several degrees in one cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimaran.nouns.measurement import Measurement
from trimaran.store.importers.cells import read_count, read_figure, read_tokens
from trimaran.store.importers.formats import Asked, Imported, import_file
from trimaran.store.importers.profile import typed_cells

GIVEN: dict[str, str | int | float] = {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 51200, "seq_len": 2048}


def imported(tmp_path: Path, headings: str, *rows: str) -> Imported:
    lines = [headings, "|".join("-" * len(headings.split("|"))), *rows]
    path = tmp_path / "paper.md"
    path.write_text("# Results\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n")
    return import_file(path, Asked(given=typed_cells(GIVEN)), "markdown")


def only(found: Imported) -> Measurement:
    assert found.refused == ()
    (row,) = found.rows
    return row


def test_headings_that_papers_spell_out_are_read(tmp_path: Path) -> None:
    headings = (
        "Number of layers | Hidden size | Attention heads | Tensor parallel size | Pipeline parallel size | # GPUs "
        "| Micro-batch | Global batch | Iteration time (ms) | TFLOP/s per GPU | Peak memory (MiB)"
    )
    row = only(imported(tmp_path, headings, "40 | 6,144 | 48 | 8 | 2 | 256 | 4 | 1,024 | 5,100 | 135 | 46,080"))
    assert (row.layers, row.hidden, row.heads, row.tp, row.pp, row.devices, row.dp) == (40, 6144, 48, 8, 2, 256, 16)
    assert (row.mbs, row.gbs, row.sec_per_it, row.tflops, row.mem_gib) == (4, 1024, 5.1, 135, 45)


def test_degrees_in_one_cell_and_a_batch_in_tokens_are_read(tmp_path: Path) -> None:
    headings = "GPUs (nodes x 8) | TP/PP/DP | MBS | Global batch (tokens) | Sec/it"
    row = only(imported(tmp_path, headings, "8x8 | 8/2/4 | 2 | 4M | 12.1 s"))
    assert (row.devices, row.tp, row.pp, row.dp, row.gbs) == (64, 8, 2, 4, 2048)
    assert "gbs of 4M tokens" in (row.notes or "")


def test_a_cell_that_has_fewer_degrees_than_its_heading_names_is_refused(tmp_path: Path) -> None:
    found = imported(tmp_path, "TP/PP/DP | MBS | GBS | Sec/it", "8/2/4 | 1 | 64 | 1.0", "8/2 | 1 | 64 | 1.0")
    assert len(found.rows) == 1
    assert found.refused == ("T1 row 2: TP/PP/DP is '8/2', expected 3 whole numbers set apart as the heading is",)


@pytest.mark.parametrize(
    ("text", "seq_len", "sequences"),
    [("4,194,304", 2048, 2048), ("4M", 2048, 2048), ("4M tokens", 2000, 2000), ("1M", 8192, 128),
     ("0.5M", 2048, 256), ("0,5M", 2048, None), ("4,194,305", 2048, None), ("4M", 128, None), ("many", 2048, None)],
)  # fmt: skip
def test_a_batch_in_tokens_is_read_where_one_number_alone_is_meant(
    text: str, seq_len: int, sequences: int | None
) -> None:
    assert read_tokens(text, seq_len) == sequences


@pytest.mark.parametrize(
    ("column", "printed"),
    [("sec_per_it", "2:05"), ("sec_per_it", "3m20s"), ("sec_per_it", "2 min 5 s"), ("sec_per_it", "1.2 it/s"),
     ("tflops", "37.5%"), ("mem_gib", "80%"), ("tokens_per_s_per_gpu", "12.3k"), ("tokens_per_s_per_gpu", "0.5 M"),
     # where a comma stands for the point that others print
     ("sec_per_it", "12,5"), ("mem_gib", "1.234,5"), ("sec_per_it", "769,99 s"), ("tflops", "1,2345")],
)  # fmt: skip
def test_a_figure_in_a_unit_that_is_not_its_columns_is_never_taken_for_one_that_is(column: str, printed: str) -> None:
    """Each was stored as measured: 2:05 as two seconds, 37.5% as TFLOPs."""
    figure = read_figure(column, printed)
    assert (figure.value, figure.status) == (None, "unreadable")


def test_a_column_of_percent_has_no_figures() -> None:
    assert read_figure("mem_gib", "80", "%").value is None


@pytest.mark.parametrize(
    ("column", "printed", "value"),
    [("sec_per_it", "1.2 h", 4320.0), ("sec_per_it", "12.1 s/it", 12.1),
     ("sec_per_it", "1.2\N{PLUS-MINUS SIGN}0.1", 1.2),
     ("mem_gib", "61.2 GB per GPU", 61.2), ("tflops", "137 TFLOPs", 137.0), ("tokens_per_s_per_gpu", "12,345", 12345.0),
     ("mem_gib", "n/a", None), ("sec_per_it", "16 (first)", 16.0)],
)  # fmt: skip
def test_a_figure_in_its_columns_unit_is_read(column: str, printed: str, value: float | None) -> None:
    figure = read_figure(column, printed)
    assert figure.value == (None if value is None else pytest.approx(value)) and figure.status != "unreadable"


def test_devices_as_nodes_times_devices_are_their_product() -> None:
    assert read_count("16x8").value == read_count("16 \N{MULTIPLICATION SIGN} 8").value == "128"


def test_a_count_in_which_a_comma_sets_no_thousands_apart_refuses_its_row(tmp_path: Path) -> None:
    """`4,8` was TP 48."""
    found = imported(tmp_path, "TP | MBS | GBS | Sec/it", "4,8 | 1 | 2,048 | 1.5", "4 | 1 | 2,048 | 1.5")
    assert found.refused == ("T1 row 1: tp is '4,8', expected a number",)
    assert [(row.tp, row.gbs) for row in found.rows] == [(4, 2048)]
