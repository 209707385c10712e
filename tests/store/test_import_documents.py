"""The five documents are read as printed, their misprints flagged, and repaired only where the user agrees."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import pytest

from trimaran.files.catalogue import CATALOG
from trimaran.files.row_nouns import nouns_of
from trimaran.files.row_table import packaged_table
from trimaran.nouns.columns import FIT_QUALITIES
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.model import padded_vocab
from trimaran.nouns.noun import TrimaranError
from trimaran.report.measured_rows import FIELDS, records
from trimaran.report.tables import render
from trimaran.store.importers.formats import Asked, Imported, import_file
from trimaran.store.importers.profile import load_profile, typed_cells

DOCUMENTS = sorted((Path(__file__).parent / "documents").glob("*.txt"))
Key = tuple[str | None, str | None, str | None]

COMPARED = (
    "cluster", "stack", "nodes", "devices_per_node", "devices", "layers", "hidden", "heads", "seq_len", "dp", "tp",
    "pp", "vpp", "mbs", "gbs", "zero_stage", "dp_kind", "recompute", "precision", "optimizer", "schedule",
    "network_delay_ms", "network_gbps", "variant", "mem_gib", "sec_per_it", "tflops", "status", "flops_formula",
    "date", "comparable_group",
)  # fmt: skip


@cache
def imported(accept: bool) -> dict[Key, Measurement]:
    rows: dict[Key, Measurement] = {}
    for path in DOCUMENTS:
        found = import_file(path, Asked(accept=lambda proposal: accept))
        assert (found.format, found.refused, found.unread) == ("markdown", (), ())
        rows |= {(row.source, row.table, row.row): row for row in found.rows}
    return rows


@cache
def seeds() -> dict[Key, Measurement]:
    return {(row.source, row.table, row.row): row for row in packaged_table().measurements}


def corrections() -> dict[Key, dict[str, str]]:
    """What the documents print where seeds.csv holds a correction: columns by row."""
    text = (CATALOG / "measurements" / "seeds_corrections.csv").read_text()
    found: dict[Key, dict[str, str]] = {}
    for line in csv.DictReader(text.splitlines()):
        found.setdefault((line["source"], line["table"], line["row"]), {})[line["field"]] = line["printed"]
    return found


def in_milliseconds(key: Key) -> bool:
    return key[:2] == ("001_a1d9f69c506d32a7", "T2")


def differs(name: str, row: Measurement, seed: Measurement, expected: object) -> bool:
    got = getattr(row, name)
    if isinstance(got, float) and isinstance(expected, int | float):
        return abs(got - expected) > 5e-4 * max(1.0, abs(expected))
    recommended = seed.quality == "recommendation" and name in ("dp", "recompute", "schedule", "flops_formula")
    other_calculator = (row.table, row.row, name) == ("T16", "2", "flops_formula")  # flagged ambiguous, see below
    return bool(got != expected) and not recommended and not other_calculator


def test_every_row_of_the_five_documents_is_read_as_printed() -> None:
    rows, printed = imported(accept=False), corrections()
    assert rows.keys() == seeds().keys() and len(rows) == 273
    wrong = []
    for key, seed in seeds().items():
        row, cells = rows[key], printed.get(key, {})
        assert padded_vocab(row.vocab, row.tp) == padded_vocab(seed.vocab, seed.tp)
        for name in COMPARED:
            expected = getattr(seed, name)
            if name in cells:
                as_number = cells[name].replace(".", "").isdigit()
                expected = float(cells[name]) if as_number else cells[name] if name == "status" else None
            elif in_milliseconds(key) and name == "sec_per_it":
                expected = getattr(seed, name) * 1000.0
            if differs(name, row, seed, expected):
                wrong.append((key, name, getattr(row, name), expected))
    assert wrong == []


def test_what_is_doubtful_is_flagged_as_in_the_published_table() -> None:
    printed, wrong = corrections(), []
    for key, row in imported(accept=False).items():
        expected = printed.get(key, {}).get("quality") or seeds()[key].quality
        if in_milliseconds(key) and expected == "ok":
            expected = "inconsistent_unit"
        if row.quality != expected:
            wrong.append((key, row.quality, expected))
    assert wrong == []


def test_accepted_repairs_give_the_corrected_table() -> None:
    rows, wrong = imported(accept=True), []
    for key, seed in seeds().items():
        row = rows[key]
        wrong += [(key, name) for name in COMPARED if differs(name, row, seed, getattr(seed, name))]
        assert (row.quality in FIT_QUALITIES) == (seed.quality in FIT_QUALITIES), key
        if row.quality != seed.quality:  # seeds.csv calls the converted milliseconds ok
            assert in_milliseconds(key) or (row.table, row.row, row.quality) == ("T16", "1", "repeat")
    assert wrong == []


def test_the_documents_read_again_pose_the_same_questions_to_the_cost_model() -> None:
    rows = imported(accept=True)
    for key, seed in seeds().items():
        if seed.quality in FIT_QUALITIES and seed.status != "not_run":
            mine, shipped = nouns_of(rows[key]), nouns_of(seed)
            assert (mine.layout, mine.cluster, mine.stack) == (shipped.layout, shipped.cluster, shipped.stack), key
            models = [
                nouns.workload.model.model_copy(update={"vocab": padded_vocab(nouns.workload.model.vocab, seed.tp)})
                for nouns in (mine, shipped)
            ]
            assert models[0] == models[1], key
            assert mine.workload.tokens_per_step == shipped.workload.tokens_per_step, key


def test_a_repair_says_what_it_changed_and_why() -> None:
    row = imported(accept=True)["000_05c62964bafd74df", "T1", "3"]
    assert (row.nodes, row.dp, row.mem_gib, row.quality) == (1024, 256, pytest.approx(19.564, abs=1e-3), "corrected")
    assert "shifted" in (row.notes or "") and "nodes 256 to 1024" in (row.notes or "")
    kept = imported(accept=False)["004_c1a2cf81af8065a2", "T15", "1"]
    assert (kept.gbs, kept.quality) == (2048, "inconsistent_gbs") and "kept as printed" in (kept.notes or "")


def test_the_user_is_asked_once_for_each_repair_with_both_values() -> None:
    asked: list[str] = []

    def decide(proposal: str) -> bool:
        asked.append(proposal)
        return "dp 8 to 4" in proposal

    path = next(path for path in DOCUMENTS if path.name.startswith("004"))
    rows = {(row.table, row.row): row for row in import_file(path, Asked(accept=decide)).rows}
    assert len(asked) == 5 and any("correct sec_per_it 120.29 to 134.02" in proposal for proposal in asked)
    assert (rows["T14", "1"].dp, rows["T14", "1"].quality) == (4, "corrected")
    assert (rows["T16", "1"].sec_per_it, rows["T16", "1"].quality) == (120.29, "swapped")


def test_oddities_are_named_in_the_notes() -> None:
    rows = imported(accept=False)
    for document, table, row, says in (
        ("000_05c62964bafd74df", "T2", "7", "marked ^"),
        ("000_05c62964bafd74df", "T1", "8", "4096, but the row has 8192 devices"),
        ("001_a1d9f69c506d32a7", "T2", "1", "1itr"),
        ("003_eca194845db01511", "T7", "2:Tensor(T)-8", "marked ??"),
        ("003_eca194845db01511", "T6", "1:Tensor(T)-8", "19.71 s is printed for T4 row 1:Pipe(P)-8 too"),
        ("004_c1a2cf81af8065a2", "T3", "8", "always hangs"),
        ("004_c1a2cf81af8065a2", "T4", "1", "layers inferred"),
        ("004_c1a2cf81af8065a2", "T13", "3", "implausible"),
        ("004_c1a2cf81af8065a2", "T16", "2", "bs_old_96BsLh2"),
        ("004_c1a2cf81af8065a2", "T25", "1", "99% of its time where 78% were due"),
        ("004_c1a2cf81af8065a2", "T27", "3", "the same set-up"),
        ("004_c1a2cf81af8065a2", "T27", "11", "72 layers do not split evenly over PP 48"),
    ):
        assert says in (rows[document, table, row].notes or ""), (table, row, rows[document, table, row].notes)


SHAPE = {"layers": 2, "hidden": 64, "heads": 4}
MINE = """# My runs
NLAYERS=24 / NHIDDEN=2048 / NHEADS=16
| GPUs | DP | TP | PP | MBS | GBS | Mem | Sec/it | TFLOPs | Fans | Notes |
| ---: | -: | -: | -: | --: | --: | --: | -----: | -----: | ---: | ----: |
| 8 | 8 | 1 | 1 | 4 | 512 | 20GB | 28 | | 3 | 05-02 quiet |
| 8 | 4 | 1 | 2 | 4 | 512 | OOM | | | 3 | 05-02 |
| 8 | 4 | 1 | 2 | 4 | 512 | 9 | many | | 3 | |
| 8 | four | 1 | 2 | 4 | 512 | 9 | 30 | | 3 | |
| 8 | 4 | 1 |
"""


def read(tmp_path: Path, text: str, **given: object) -> Imported:
    path = tmp_path / "mine.md"
    path.write_text(text)
    return import_file(path, Asked(given=typed_cells({"seq_len": 2048, "vocab": 50257, **given})))  # type: ignore[dict-item]


def test_a_table_of_ones_own_is_read_with_what_text_and_user_state(tmp_path: Path) -> None:
    found = read(tmp_path, MINE, cluster="jean-zay-v100-32gb")
    first, second, third = found.rows
    assert (first.layers, first.hidden, first.heads, first.mem_gib, first.sec_per_it) == (24, 2048, 16, 20.0, 28.0)
    assert (first.cluster, first.devices, first.dp) == ("jean-zay-v100-32gb", 8, 8)
    assert first.notes == "printed note: 05-02 quiet"
    assert (second.status, second.sec_per_it) == ("oom", None)
    assert third.quality == "ambiguous" and "many" in (third.notes or "")
    assert found.unread == ("Fans",)
    assert "row 4" in found.refused[0] and "'four'" in found.refused[0]
    assert "row 5" in found.refused[1] and "3 cells, the header 11" in found.refused[1]


def test_another_version_of_a_document_is_not_met_by_a_profile_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "000.md"
    path.write_text(
        DOCUMENTS[0].read_text() + "\n| Nodes | DP | TP | PP | MBS | GBS |\n|-|-|-|-|-|-|\n| 1 | 1 | 1 | 1 | 1 | 8 |\n"
    )
    found = import_file(path, Asked())
    assert (found.rows, found.profile) == ((), "") and "with 3 tables, this one has 4" in found.remarks[0]
    asked = import_file(path, Asked(load_profile("fugaku-1b3")))
    assert asked.profile == "fugaku-1b3" and "with 3 tables" in asked.remarks[0] and len(asked.rows) == 18


def test_units_in_headings_and_cells_are_heeded(tmp_path: Path) -> None:
    table = "| GPUs | DP | MBS | GBS | Mem (MiB) | Sec/it [ms] |\n|-|-|-|-|-|-|\n| 8 | - | 1 | 8 | 20480 | 350 |\n"
    found = read(tmp_path, table + "| 8 | 8 | 1 | 8 | 20 GiB | 0.35 s |\n", **SHAPE)
    assert [(row.dp, row.mem_gib, row.sec_per_it) for row in found.rows] == [(8, 20.0, 0.35)] * 2
    assert [row.quality for row in found.rows] == ["ok", "duplicate"]


def test_tables_without_outer_bars_and_context_parallel_runs_are_read(tmp_path: Path) -> None:
    found = read(
        tmp_path, "GPUs | DP | TP | cp | PP | MBS | GBS | Sec/it\n-|-|-|-|-|-|-|-\n16|2|4|2|1|1|8|3.5\n", **SHAPE
    )
    (row,) = found.rows
    assert (row.devices, row.dp, row.cp, row.sec_per_it, row.quality) == (16, 2, 2, 3.5, "ok")


def test_what_nobody_states_is_named_with_the_way_out(tmp_path: Path) -> None:
    found = read(tmp_path, MINE.replace("NHEADS=16", ""))
    assert not found.rows and "heads" in found.refused[-1] and "--set heads=" in found.refused[-1]


def test_trimarans_own_markdown_report_is_read_back(tmp_path: Path) -> None:
    wanted = [row for row in packaged_table().measurements if row.table == "T27"]
    found = read(tmp_path, render(records(wanted), FIELDS, "markdown"), layers=72, hidden=14336, heads=64, vocab=250880)
    assert [(r.dp, r.tp, r.pp, r.mbs, r.status, r.zero_stage) for r in found.rows] == [
        (r.dp, r.tp, r.pp, r.mbs, r.status, r.zero_stage) for r in wanted
    ]
    assert [r.sec_per_it for r in found.rows] == [r.sec_per_it for r in wanted]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[set]\nlayers = 'many'\n", "layers is 'many'"),
        ("[set]\nlayrs = 2\n", "layrs"),
        ("[columns]\nSpeed = 'speed'\n", "speed"),
        ("[[table]]\nnumbers = 1\n", "numbers"),
        ("unknown = 1\n", "unknown"),
        ("[set\n", "not valid TOML"),
        ("a = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_a_bad_profile_is_told_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(TrimaranError) as error:
        load_profile(str(path))
    assert says in str(error.value) and "\n" not in str(error.value)
