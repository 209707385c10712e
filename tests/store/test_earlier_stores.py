"""Claims about stores that earlier versions wrote: they are migrated once, and their rows stay."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

from small_disk import mounted
from store_rows import LAYOUT
from trimaran.files.row_nouns import nouns_of
from trimaran.nouns.measurement import Measurement
from trimaran.store import Store
from trimaran.store.schema import APPLICATION_ID, MIGRATIONS, VERSION


def earlier_store(path: Path, *rows: Measurement) -> None:
    """A store as versions wrote it that kept no model."""
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        for statement in MIGRATIONS[0]:
            connection.execute(statement)
        connection.execute("INSERT INTO migration (version) VALUES (1)")
        connection.execute("PRAGMA user_version = 1")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        kept = {name for _, name, *_ in connection.execute("PRAGMA table_info(measurement)")}
        for row in rows:
            cells = {
                name: json.dumps(value) if isinstance(value, list | dict) else value
                for name, value in row.model_dump(mode="json", include=kept).items()
            }
            names = ", ".join(f'"{name}"' for name in cells)
            marks = ", ".join("?" * len(cells))
            connection.execute(f"INSERT INTO measurement ({names}) VALUES ({marks})", list(cells.values()))
    connection.close()


def test_rows_of_an_earlier_store_keep_the_layout_of_their_label(row: Measurement, tmp_path: Path) -> None:
    earlier_store(tmp_path / "s.sqlite", row)
    with Store(tmp_path / "s.sqlite") as store:
        (kept,) = store.measurements()
    assert kept == row.model_copy(update={"model": None})
    nouns = (
        nouns_of(kept, "dgx-h100")
        if kept.cluster is None
        else nouns_of(kept.model_copy(update={"cluster": None}), "dgx-h100")
    )
    assert nouns.layout == LAYOUT
    assert (nouns.workload.model.layers, nouns.workload.model.ffn_hidden) == (8, 200)


OPEN_TOGETHER = """
import sys, time
from trimaran.store import Store
print("ready", flush=True)
sys.stdin.readline()
with Store(sys.argv[1]) as store:
    print(len(store.measurements()))
"""


def test_processes_that_migrate_one_earlier_store_at_once_all_find_its_rows(row: Measurement, tmp_path: Path) -> None:
    rows = [row.model_copy(update={"trial_key": f"k{number}"}) for number in range(50)]
    earlier_store(tmp_path / "s.sqlite", *rows)
    opened = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN_TOGETHER, str(tmp_path / "s.sqlite")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in opened:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in opened:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    told = [process.communicate(timeout=60) for process in opened]
    assert told == [("50\n", "")] * 2
    with sqlite3.connect(tmp_path / "s.sqlite") as connection:
        versions = [version for (version,) in connection.execute("SELECT version FROM migration ORDER BY version")]
    assert versions == list(range(1, VERSION + 1))


def test_an_earlier_store_on_a_read_only_disk_is_read(row: Measurement, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "2m") as disk:
        earlier_store(disk / "s.sqlite", row)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with Store(disk / "s.sqlite", create=False) as store:
            assert store.measurements() == [row.model_copy(update={"model": None})]


def test_a_row_stored_before_models_were_kept_is_not_added_again(row: Measurement, tmp_path: Path) -> None:
    earlier_store(tmp_path / "s.sqlite", row.model_copy(update={"layout_label": None}))
    with Store(tmp_path / "s.sqlite") as store:
        assert store.add_new([row]) == 0
        assert store.add_new([row.model_copy(update={"sec_per_it": 9.0, "trial_key": None})]) == 1
