"""The table contract: cells are checked one by one, bad rows are named, the others go on."""

from __future__ import annotations

import csv
import io
import itertools
import random
import tracemalloc
from pathlib import Path

import pytest

from table_text import table_text
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate_each
from trimaran.cost.estimates import Estimate
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.score import kendall_tau
from trimaran.cost.table.predict_table import predict_table, score_groups
from trimaran.files.catalogue import load_cluster
from trimaran.files.row_nouns import nouns_of
from trimaran.files.row_table import (
    Table,
    misspelt_columns,
    packaged_table,
    packaged_tables,
    parse_table,
    read_table,
)
from trimaran.nouns.columns import BY_NAME, COLUMNS, parse_cell
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.store.importers.formats import Asked, import_file

SEEDS = packaged_table()


def edited(column: str, value: str, number: int = 1) -> Table:
    """The packaged seeds table with one cell changed."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=SEEDS.header)
    writer.writeheader()
    for row in SEEDS.rows:
        writer.writerow(row.cells | ({column: value} if row.number == number else {}))
    return parse_table(out.getvalue(), "edited")


def test_the_contract_is_the_header_of_the_seeds_table() -> None:
    assert SEEDS.header == tuple(column.name for column in COLUMNS)
    assert len(SEEDS.rows) == 273


def test_every_packaged_row_is_read() -> None:
    for name in packaged_tables():
        assert not [row.error for row in packaged_table(name).rows if row.error]


@pytest.mark.parametrize("value", ["0", "-1", "1e30", "NaN", "inf", "text", "1.5"])
@pytest.mark.parametrize("column", [c.name for c in COLUMNS if c.kind == "int" and c.minimum])
def test_an_impossible_number_is_named_by_row_and_column_and_the_others_go_on(column: str, value: str) -> None:
    table = edited(column, value)
    assert table.rows[0].error and table.rows[0].error.startswith("row 1: ") and column in table.rows[0].error
    assert len(table.measurements) == 272


@pytest.mark.parametrize("column", [c.name for c in COLUMNS if c.choices])
def test_an_unknown_word_gets_the_known_ones(column: str) -> None:
    error = edited(column, "nonsense").rows[0].error
    assert error and column in error and BY_NAME[column].choices[0] in error


def test_a_shifted_row_is_noticed() -> None:
    text = table_text(SEEDS.measurements[:2])
    lines = text.splitlines()
    shifted = "\n".join([lines[0], "extra," + lines[1], lines[2]])
    table = parse_table(shifted, "shifted")
    assert table.rows[0].error and "shifted" in table.rows[0].error
    assert table.rows[1].measurement is not None


@pytest.mark.parametrize("shift", ["a blank too many", "a cell too few"])
def test_cells_shifted_by_one_are_noticed_wherever_it_begins(shift: str) -> None:
    """As in document 000; up to the last two columns, whose text may be anything."""
    names = SEEDS.header
    whole = [[row.cells[name] for name in names] for row in SEEDS.rows[::60] if row.cells["comparable_group"]]
    for start in range(len(names) - 2):
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(names)
        for cells in whole:
            moved = ["", *cells[start:-1]] if shift == "a blank too many" else [*cells[start + 1 :], ""]
            writer.writerow(cells[:start] + moved)
        for row in predict_table(parse_table(out.getvalue(), "shifted")):
            assert row.error, f"{names[start]}: {row.row.cells}"


def test_a_table_without_a_required_column_is_refused() -> None:
    with pytest.raises(TrimaranError, match="lacks column 'heads'"):
        parse_table("layers,hidden,seq_len,vocab,mbs,gbs\n1,2,3,4,5,6\n", "t")


def test_a_row_that_names_no_cluster_is_refused() -> None:
    row = SEEDS.measurements[0].model_copy(update={"cluster": None})
    with pytest.raises(TrimaranError, match="names no cluster"):
        nouns_of(row)


def test_a_row_that_contradicts_itself_is_refused_with_both_numbers() -> None:
    (row,) = [m for m in SEEDS.measurements if m.quality == "inconsistent_layout"]
    with pytest.raises(TrimaranError, match=r"= 4096, but devices is 8192"):
        nouns_of(row)


def test_a_known_shape_brings_what_the_table_has_no_column_for() -> None:
    gpt3_xl = next(m for m in SEEDS.measurements if m.stack == "gpipe")
    assert nouns_of(gpt3_xl).workload.model.head == "classifier"


def test_clock_and_network_of_a_row_shape_its_cluster() -> None:
    clocked = next(m for m in SEEDS.measurements if m.variants.get("clock") == "2.2GHz")
    assert nouns_of(clocked).cluster.device.peak_tflops["fp32"] == pytest.approx(6.7584)
    slow = next(m for m in SEEDS.measurements if m.network_delay_ms == 50)
    assert nouns_of(slow).cluster.inter.latency_us == 50_000
    assert nouns_of(slow).cluster.inter.bandwidth_gbps == 1


def test_measurements_written_read_back() -> None:
    again = parse_table(table_text(SEEDS.measurements), "again")
    assert again.measurements == SEEDS.measurements


def test_blank_cells_get_the_stated_default() -> None:
    assert parse_cell(BY_NAME["zero_stage"], "") == 0
    assert parse_cell(BY_NAME["recompute"], " ") == "none"
    assert parse_cell(BY_NAME["mem_gib"], "") is None


def test_a_misspelt_column_that_is_not_required_is_told() -> None:
    header = ["recomputee" if name == "recompute" else name for name in SEEDS.header]
    (told,) = misspelt_columns([*header, "my_own_remark"])
    assert "'recomputee' is not known" in told and "'recompute' is missing" in told
    assert not misspelt_columns(SEEDS.header)


@pytest.mark.parametrize(("stack", "splits"), [("torchtitan", True), ("megatron", False)])
def test_a_published_row_has_sequence_parallelism_where_its_stack_always_does(stack: str, splits: bool) -> None:
    row = Measurement(
        layers=32, hidden=4096, heads=32, seq_len=8192, vocab=128256, dp=8, tp=8, pp=1, mbs=1, gbs=8, zero_stage=0,
        recompute="none", precision="bf16", optimizer="adam", cluster="dgx-h100", stack=stack,
    )  # fmt: skip
    assert nouns_of(row).layout.sequence_parallel is splits
    assert not nouns_of(row.model_copy(update={"tp": 1, "dp": 64, "gbs": 64})).layout.sequence_parallel


def test_a_node_half_filled_leaves_the_cards_of_its_idle_devices_unused() -> None:
    row = Measurement(
        layers=32, hidden=4096, heads=32, seq_len=4096, vocab=32000, dp=64, tp=1, pp=1, mbs=1, gbs=64, zero_stage=3,
        dp_kind="fully_sharded", recompute="none", precision="bf16", optimizer="adam", stack="torch-fsdp",
        devices_per_node=4, cluster="dgx-a100-80gb",
    )  # fmt: skip
    whole = load_cluster("dgx-a100-80gb")
    assert nouns_of(row).cluster.inter.bandwidth_gbps == whole.inter.bandwidth_gbps / 2
    shared = row.model_copy(update={"cluster": "aws-p3-16xlarge"})
    assert nouns_of(shared).cluster.inter == load_cluster("aws-p3-16xlarge").inter
    assert nouns_of(row.model_copy(update={"network_gbps": 100.0})).cluster.inter.bandwidth_gbps == 100.0


GQA = {"kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"model": "llama3-70b", "layers": 4}, {"layers": 4, "hidden": 8192, "kv_heads": 8, "mlp": "swiglu"}),
        ({"model": "Llama-3-8B", "layers": 4}, {"layers": 4, "hidden": 4096, "norm": "rmsnorm"}),
        ({"model": "llama3-8b", "head_dim": 64}, {"head_dim": 64, "attention_hidden": 2048, "kv_hidden": 512}),
        ({"model": "llama3-8b", "mlp": "gelu"}, {"mlp": "gelu", "ffn_hidden": 14336}),
        (
            {"model": "ours", "layers": 8, "hidden": 1024, "heads": 16, "vocab": 50257, "mlp": "swiglu", **GQA},
            {"attention_hidden": 2048, "norm": "rmsnorm", "positions": "rotary", "bias": False, "kv_hidden": 1024},
        ),
        ({"layers": 24, "hidden": 2048, "heads": 16, "vocab": 50257, "attention": "mha"}, {"mlp": "gelu"}),
    ],
)
def test_columns_of_a_model_override_it(cells: dict[str, object], expected: dict[str, object]) -> None:
    common = {"cluster": "dgx-h100", "stack": "megatron", "seq_len": 1024, "mbs": 1, "gbs": 8, "dp": 8}
    (row,) = parse_table(as_text(common | cells), "t").rows
    assert row.measurement is not None, row.error
    nouns = nouns_of(row.measurement)
    model = nouns.workload.model
    assert {name: getattr(model, name) for name in expected} == expected
    assert any("'ours' is not in the catalogue" in note for note in nouns.notes) == (cells.get("model") == "ours")
    again = parse_table(table_text([row.measurement]), "again").measurements
    assert again == [row.measurement]


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"attention": "mla"}, "attention is mla, but model llama3-8b has none that is latent"),
        ({"attention": "mha"}, "attention is mha, but heads 32 have 8 key-value heads"),
        ({"attention": "gqa", "kv_heads": 32}, "attention is gqa, but heads 32 have 32 key-value heads"),
        ({"experts": 10}, "experts is 10, but top_k is 0: state it"),
        ({"ep": "many"}, "ep is 'many', expected a number"),
        ({"ep": 2}, "EP 2 lays out experts, but the model has none"),
        ({"cp": 2, "devices": 8}, "DP 8 x TP 1 x CP 2 x PP 1 = 16, but devices is 8"),
    ],
)
def test_traits_that_are_not_predicted_or_contradict_the_model_are_refused_by_name(
    cells: dict[str, object], says: str
) -> None:
    common = {"cluster": "dgx-h100", "stack": "megatron", "seq_len": 1024, "mbs": 1, "gbs": 8, "dp": 8}
    (row,) = predict_table(parse_table(as_text(common | {"model": "llama3-8b"} | cells), "t"))
    assert row.estimate is None and says in (row.error or "")


def test_a_dense_model_in_a_table_of_mixtures_is_predicted() -> None:
    common = {"cluster": "dgx-h100", "stack": "megatron", "seq_len": 1024, "mbs": 1, "gbs": 8, "dp": 8}
    (row,) = predict_table(parse_table(as_text(common | {"model": "llama3-8b", "experts": 0, "ep": "1.0"}), "t"))
    assert row.estimate is not None, row.error


def test_heads_wider_than_the_hidden_state_cost_their_width() -> None:
    common = {"cluster": "dgx-h100", "stack": "megatron", "model": "llama3-8b", "seq_len": 4096, "mbs": 1, "gbs": 8}
    tables = [as_text({**common, "dp": 8, "head_dim": width, "precision": "bf16"}) for width in (128, 256)]
    usual, wide = (predict_table(parse_table(text, "t"))[0].estimate for text in tables)
    assert usual and wide and wide.time.forward > 1.1 * usual.time.forward
    extra = (2 * 32 + 2 * 8) * 128 * 4096 * 32  # parameters of q, k, v and projection that the wider heads add
    assert (wide.memory[0].weights - usual.memory[0].weights) * 2**30 == pytest.approx(2 * extra, rel=1e-6)


def as_text(cells: dict[str, object]) -> str:
    return ",".join(cells) + "\n" + ",".join(map(str, cells.values())) + "\n"


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("before", ["", "{end}", " {end},,{end}"], ids=["nothing", "a blank line", "lines of blanks"])
def test_a_table_is_read_whatever_ends_its_lines_and_with_blank_ones_first(
    before: str, ends: str, tmp_path: Path
) -> None:
    rows = [row for row in SEEDS.measurements if row.sec_per_it][:3]
    text = before.format(end=ends) + table_text(rows).replace("\n", ends)
    (tmp_path / "t.csv").write_bytes(text.encode())
    table = read_table(tmp_path / "t.csv")
    assert [row.number for row in table.rows] == [1, 2, 3]
    assert [row.sec_per_it for row in table.measurements] == [row.sec_per_it for row in rows]
    assert len(import_file(tmp_path / "t.csv", Asked()).rows) == 3


def test_a_table_of_another_encoding_is_refused_by_an_import_as_by_a_prediction(tmp_path: Path) -> None:
    row = SEEDS.measurements[0].model_copy(update={"notes": "mesur\u00e9"})
    (tmp_path / "t.csv").write_bytes(table_text([row]).encode("latin-1"))
    for read in (read_table, lambda path: import_file(path, Asked())):
        with pytest.raises(TrimaranError, match=r"t\.csv is not UTF-8 text"):
            read(tmp_path / "t.csv")


def test_rows_that_ask_the_same_are_predicted_once_whatever_was_measured() -> None:
    row = next(m for m in SEEDS.measurements if m.cluster == "jean-zay-a100-80gb" and m.sec_per_it and m.tflops)
    again = row.model_copy(update={"sec_per_it": 1.0, "mem_gib": 2.0, "source": "another", "status": "oom"})
    other = row.model_copy(update={"gbs": 4 * row.gbs})
    first, second, third = predict_table(parse_table(table_text([row, again, other]), "t"))
    assert first.estimate is not None and first.estimate is second.estimate
    assert first.cells() == second.cells() != third.cells()
    assert [answer.seconds for answer in (first, second)] == [row.sec_per_it, 1.0]


def test_rows_that_differ_in_layout_and_batch_are_predicted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(m for m in SEEDS.measurements if m.cluster == "jean-zay-a100-80gb" and m.sec_per_it and m.pp == 12)
    rows = [row.model_copy(update={"gbs": row.gbs * n, "mbs": mbs}) for n in range(1, 17) for mbs in (1, 2)]
    sizes: list[int] = []

    def counted(case: Case, grid: LayoutGrid, *, simulate: bool) -> list[Estimate]:
        sizes.append(len(grid))
        return estimate_each(case, grid, simulate=simulate)

    monkeypatch.setattr("trimaran.cost.table.row_answers.estimate_each", counted)
    assert all(answer.estimate for answer in predict_table(parse_table(table_text(rows), "t")))
    assert sizes == [32]


@pytest.mark.proof
def test_rows_of_one_cluster_hold_one_copy_of_it_while_they_are_predicted() -> None:
    row = next(m for m in SEEDS.measurements if m.cluster == "jean-zay-a100-80gb" and m.sec_per_it and m.pp == 12)
    table = parse_table(table_text([row.model_copy(update={"gbs": row.gbs * n}) for n in range(1, 1001)]), "t")
    predict_table(table)
    tracemalloc.start()
    answers = predict_table(table)
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(answers) == 1000
    assert most - held < 1000 * 7500  # bytes; 5200 a row, 9600 with a cluster and a model of its own


def test_a_row_has_the_prediction_in_a_table_that_it_has_alone() -> None:
    together = predict_table(SEEDS)
    for answer in together[::5]:
        (alone,) = predict_table(Table(SEEDS.header, (answer.row,)))
        assert alone.cells() == answer.cells()


def test_a_row_that_cannot_be_answered_is_refused_as_often_as_it_is_asked() -> None:
    row = SEEDS.measurements[0].model_copy(update={"tp": 7, "dp": None, "devices": None})
    first, second = predict_table(parse_table(table_text([row, row]), "t"))
    assert first.error and first.error == second.error


def test_what_scores_take_grows_with_the_rows_and_not_with_their_pairs() -> None:
    row = next(m for m in SEEDS.measurements if m.cluster == "jean-zay-a100-80gb" and m.sec_per_it and m.mem_gib)
    rows = [row.model_copy(update={"mem_gib": 20.0 + number % 7}) for number in range(3000)]
    answers = predict_table(parse_table(table_text(rows), "t"))
    tracemalloc.start()
    score_groups(answers)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 3000 * 10_000  # bytes; a number for each pair takes 36 MB, and there were eight


@pytest.mark.parametrize(("rows", "values"), [(2, 9), (7, 3), (64, 5), (65, 1000), (300, 20), (300, 10**6)])
def test_rank_tau_is_that_of_all_pairs(rows: int, values: int) -> None:
    draw = random.Random(rows * values)
    predicted, measured = ([0.1 * draw.randrange(values) for _ in range(rows)] for _ in range(2))
    pairs = list(itertools.combinations(zip(predicted, measured, strict=True), 2))
    signs = [((a > b) - (a < b), (x > y) - (x < y)) for (a, x), (b, y) in pairs]
    norm = float(sum(p != 0 for p, _ in signs) * sum(m != 0 for _, m in signs)) ** 0.5
    assert kendall_tau(predicted, measured) == pytest.approx(sum(p * m for p, m in signs) / norm)


def test_there_is_no_rank_tau_where_all_values_are_equal() -> None:
    assert kendall_tau([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
    assert kendall_tau([1.0], [1.0]) is None
