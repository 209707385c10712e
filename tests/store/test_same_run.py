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
    stated = [word for name, value in CELLS.items() for word in ("--set", f"{name}={value}")]
    for added in (1, 0):
        done = run("import", *names, "--into", str(tmp_path / "s.sqlite"), *stated, "--format", "json")
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
