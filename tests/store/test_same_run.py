"""Rows of one run count once: of a log that grew since it was imported, and of logs that every rank wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import run
from trimaran.nouns.measurement import Measurement
from trimaran.store import Store
from trimaran.store.importers.formats import Asked, import_file
from trimaran.store.importers.profile import typed_cells
from trimaran.store.importers.same_run import mark_ranks

CELLS: dict[str, str | int | float] = {
    "layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "seq_len": 1024, "mbs": 4, "dp": 8, "tp": 1, "pp": 1,
    "zero_stage": 0, "recompute": "none", "precision": "bf16", "optimizer": "adam",
}  # fmt: skip
LINE = " iteration {}/ 9 | elapsed time per iteration (ms): {} | global batch size: 64 | lm loss: {} |\n"


STATED = [word for name, value in CELLS.items() for word in ("--set", f"{name}={value}")]


def rows(folder: Path, times: list[float], name: str = "train.log", seed: int = 0) -> tuple[Measurement, ...]:
    """The rows of a log whose iterations took so many ms."""
    path = folder / name
    path.write_text("".join(LINE.format(n, ms, 9.5 - n / 8 - seed) for n, ms in enumerate(times, start=1)))
    return import_file(path, Asked(given=typed_cells(CELLS))).rows


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 0)])
@pytest.mark.parametrize("shared", [False, True])
def test_of_a_log_that_grew_the_longest_row_counts(tmp_path: Path, order: tuple[int, ...], shared: bool) -> None:
    path = tmp_path / "s.sqlite"
    if shared:
        (tmp_path / "s.sqlite.rows").mkdir()
    logs = [rows(tmp_path, [900.5, 500.5, 501.5]), rows(tmp_path, [900.5, 500.5, 501.5, 502.5])]
    for at in order:
        with Store(path) as store:
            store.add_new(logs[at])
    with Store(path) as store:
        (row,) = store.measurements()
    assert row.step_times_s == (0.9005, 0.5005, 0.5015, 0.5025)
    with Store(tmp_path / "merged.sqlite") as merged, Store(path) as store:
        merged.add_new(store.measurements(every_attempt=True)[::-1])
        assert merged.measurements() == [row]


RAMP = " iteration {}/ 9 | elapsed time per iteration (ms): {} | global batch size: {} | lm loss: {} |\n"


@pytest.mark.parametrize("shared", [False, True])
def test_a_row_that_had_one_step_is_that_of_the_run_when_it_has_more(tmp_path: Path, shared: bool) -> None:
    """It counted beside the longer one, by a time with the start-up in it or of a batch that had just begun."""
    log, store = tmp_path / "train.log", tmp_path / "s.sqlite"
    if shared:
        (tmp_path / "s.sqlite.rows").mkdir()
    batches = (32, 32, 64, 64, 64, 64)
    lines = [RAMP.format(n, 14.0123 * gbs - n / 7, gbs, 9.5 - n / 8) for n, gbs in enumerate(batches, start=1)]
    for made, added in ((1, 1), (3, 2), (3, 0), (6, 1)):
        log.write_text("".join(lines[:made]))
        done = run("import", str(log), "--into", str(store), *STATED, "--format", "json")
        assert json.loads(done.stdout)[0]["added"] == added
    with Store(store) as stored:
        rows = [(row.gbs, len(row.step_times_s)) for row in stored.measurements()]
    assert sorted(rows) == [(32, 2), (64, 4)]


def test_a_log_that_was_imported_before_rows_of_logs_had_keys_is_there(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, [900.5, 500.5])
    with Store(tmp_path / "s.sqlite") as store:
        assert store.add_new([row.model_copy(update={"trial_key": None})]) == 1
        assert store.add_new([row]) == 0


def test_logs_of_other_runs_are_rows_of_their_own(tmp_path: Path) -> None:
    logs = [
        rows(tmp_path, [900.5, 500.5]),
        rows(tmp_path, [900.5, 500.6, 1.5], seed=1),
        rows(tmp_path, [900.5, 500.5, 1.5], name="other.log", seed=2),
        rows(tmp_path, [1000.0, 2000.0]),
        rows(tmp_path, [1000.0, 2000.0, 3000.0]),
    ]
    with Store(tmp_path / "s.sqlite") as store:
        assert [store.add_new(log) for log in logs] == [1] * len(logs)
        assert len(store.measurements()) == len(logs), "times of whole seconds, as a bar's, tell no runs apart"


def test_logs_of_the_ranks_of_one_run_are_marked(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        rows(tmp_path, [900.5 + rank, 500.5, 501.5], name=f"rank{rank}.log")
    names = [str(tmp_path / f"rank{rank}.log") for rank in (0, 1, 2)]
    for added in (1, 0):
        done = run("import", *names, "--into", str(tmp_path / "s.sqlite"), *STATED, "--format", "json")
        assert [(file["added"], file["flagged"]) for file in json.loads(done.stdout)] == [
            (added, None), (added, "1 duplicate"), (added, "1 duplicate")
        ]  # fmt: skip
    with Store(tmp_path / "s.sqlite") as store:
        assert [row.quality for row in store.measurements()] == ["ok", "duplicate", "duplicate"]
        assert "the same run as rank0: every loss is equal" in (store.measurements()[2].notes or "")


def test_a_rank_that_does_not_state_all_is_marked_too_and_a_contradiction_stays(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, [900.5, 500.5])
    files = [[row.model_copy(update={"quality": quality})] for quality in ("incomplete", "incomplete", "suspect")]
    assert [row.quality for (row,) in mark_ranks(files)] == ["incomplete", "duplicate", "suspect"]


def test_runs_of_other_losses_or_of_one_step_are_not_marked(tmp_path: Path) -> None:
    files = [
        rows(tmp_path, [900.5, 500.5]),
        rows(tmp_path, [900.5, 500.5], name="b.log", seed=1),
        rows(tmp_path, [900.5], name="c.log"),
        rows(tmp_path, [900.5], name="d.log"),
    ]
    assert [row.quality for (row,) in mark_ranks(files)] == ["ok"] * 4


def test_logs_of_ranks_are_marked_too_where_they_are_imported_one_by_one(tmp_path: Path) -> None:
    """And the first of them, and all, add nothing when they are imported again."""
    path = tmp_path / "s.sqlite"
    for rank in (0, 1):
        rows(tmp_path, [900.5 + rank, 500.5, 501.5], name=f"rank{rank}.log")
    names = [str(tmp_path / f"rank{rank}.log") for rank in (0, 1)]
    added = []
    for files in ([names[0]], [names[1]], [names[0]], [names[1]], names):
        done = run("import", *files, "--into", str(path), *STATED, "--format", "json")
        added.append([file["added"] for file in json.loads(done.stdout)])
    assert added == [[1], [1], [0], [0], [0, 0]]
    with Store(path) as store:
        assert [row.quality for row in store.measurements()] == ["ok", "duplicate"]


@pytest.mark.parametrize("clocks", [("03:02:11", "03:02:13"), ("03:02:11", "03:41:09"), ("", "")])
def test_two_runs_of_one_seed_are_told_from_two_ranks_of_one_run(tmp_path: Path, clocks: tuple[str, str]) -> None:
    """By the clock of the last step where the logs have one, else by the times of the steps."""
    slower = 30.0 if not clocks[0] else 0.0
    files = []
    for at, clock in enumerate(clocks):
        name = f"{at}.log"
        rows(tmp_path, [900.5, 500.5 + at * slower, 501.5 + at * slower], name=name)
        lines = (tmp_path / name).read_text().splitlines()
        lines[-1] = f" [2026-04-06 {clock}]{lines[-1]}" if clock else lines[-1]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        files.append(import_file(tmp_path / name, Asked(given=typed_cells(CELLS))))
    marked = mark_ranks([file.rows for file in files], [file.ended for file in files])
    same = clocks == ("03:02:11", "03:02:13")
    assert [row.quality for (row,) in marked] == ["ok", "duplicate" if same else "ok"]


def test_a_log_that_was_imported_under_another_name_when_it_was_shorter_counts_once(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        store.add_new(rows(tmp_path, [900.5, 500.5, 501.5], name="at-noon.log"))
        store.add_new(rows(tmp_path, [900.5, 500.5, 501.5, 502.5], name="train.log"))
        (row,) = store.measurements()
    assert row.source == "train" and len(row.step_times_s) == 4


def test_what_was_stated_wrong_is_mended_by_another_import(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    rows(tmp_path, [900.5, 500.5, 501.5])
    for stated in ("dp=4", "dp=8"):
        cells = [stated if word == "dp=8" else word for word in STATED]
        done = run("import", str(tmp_path / "train.log"), "--into", str(path), *cells, "--format", "json")
        assert [file["added"] for file in json.loads(done.stdout)] == [1]
    with Store(path) as store:
        assert [row.dp for row in store.measurements()] == [8]
        assert len(store.measurements(every_attempt=True)) == 2


def test_a_rank_of_the_same_times_never_stands_for_the_row_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    for name in ("a.log", "b.log"):
        rows(tmp_path, [900.5, 500.5, 501.5], name=name)
    run("import", str(tmp_path / "a.log"), str(tmp_path / "b.log"), "--into", str(path), *STATED)
    with Store(path) as store:
        assert [row.quality for row in store.measurements()] == ["ok", "duplicate"]


def test_a_file_that_cannot_be_read_does_not_keep_the_others_out(tmp_path: Path) -> None:
    rows(tmp_path, [900.5, 500.5], name="good.log")
    (tmp_path / "empty.log").touch()
    (tmp_path / "other.log").write_text("epoch 1 took a while\n")
    names = [str(tmp_path / name) for name in ("empty.log", "good.log", "other.log", "absent.log")]
    done = run("import", *names, "--into", str(tmp_path / "s.sqlite"), *STATED, "--format", "json")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert [file["added"] for file in json.loads(done.stdout)] == [1]
    said = done.stderr.splitlines()
    assert len(said) == 4 and "empty.log is empty" in said[0] and "absent.log cannot be read" in said[2]
    assert "3 of 4 files are not imported" in said[3] and "empty.log, other.log, absent.log" in said[3]
    with Store(tmp_path / "s.sqlite") as store:
        assert len(store.measurements()) == 1
