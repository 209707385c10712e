"""A disk without room: each file that a user asked for ends in one line, and what was finished before stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from command_answers import Answer, Try, answer
from small_disk import mounted
from trimaran.files.row_table import packaged_table, write_table
from trimaran.store import Store

QUESTION = ("--model", "gpt2-124m", "--cluster", "dgx-h100", "--gbs", "64")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 1 MiB with a store and old files on it, and no room left."""
    with mounted(tmp_path_factory.mktemp("disk"), "1m") as disk:
        with Store(disk / "s.sqlite") as store:
            store.add(packaged_table().measurements[0])
        for name in ("old.csv", "old.html", "old.toml", "old.parquet", "old.svg", "old.json", "old.txt"):
            (disk / name).write_text("old")
        with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="space"):
            while True:
                filler.write(b"x" * 4096)
        yield disk


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A store elsewhere, with more rows than the disk has room for."""
    with Store(tmp_path / "rows.sqlite") as store:
        wide = {"evidence": "x" * 20_000, "trial_key": None}
        first = packaged_table().measurements[0]
        for number in range(40):
            store.add(first.model_copy(update=wide | {"mbs": 1 + number % 2, "sec_per_it": 9.0 + number}))
    return tmp_path / "rows.sqlite"


def assert_told(done: Answer, *says: str) -> None:
    lines = done.output.strip().splitlines()
    assert done.status == 2 and lines[-1].startswith("trimaran: ") and len(lines) <= 3, done.output
    assert all(word in lines[-1] for word in says), done.output


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("old.csv", ["report", "{rows}", "-o", "{disk}/old.csv"]),
        ("old.csv", ["store", "{rows}", "export", "-o", "{disk}/old.csv"]),
        ("old.csv", ["predict", "seeds", "-o", "{disk}/old.csv"]),
        ("old.parquet", ["store", "{rows}", "export", "-o", "{disk}/old.parquet"]),
        ("old.html", ["report", "{rows}", "-o", "{disk}/old.html"]),
        ("old.svg", ["report", "{rows}", "-o", "{disk}/old.svg", "--figure", "front"]),
        ("old.toml", ["fit", "seeds", "-o", "{disk}/old.toml", "--cluster", "jean-zay-v100-32gb"]),
        ("old.json", ["timeline", *QUESTION, "--layout", "pp2,mbs1", "-o", "{disk}/old.json"]),
        ("old.svg", ["timeline", *QUESTION, "--layout", "pp2,mbs1", "-o", "{disk}/old.svg"]),
        ("old.txt", ["export", *QUESTION, "--devices", "8", "-o", "{disk}/old.txt"]),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_a_file_that_finds_no_room_leaves_the_old_one(
    full: Path, rows: Path, tmp_path: Path, name: str, arguments: list[str]
) -> None:
    before = sorted(path.name for path in full.iterdir())
    done = answer(Try(tuple(word.format(disk=full, rows=rows) for word in arguments)), tmp_path)
    assert_told(done, name, "space")
    assert (full / name).read_text() == "old" and sorted(path.name for path in full.iterdir()) == before


def test_a_probe_is_refused_before_it_measures_what_finds_no_room(full: Path, tmp_path: Path) -> None:
    """It measured for minutes first."""
    before = sorted(path.name for path in full.iterdir())
    done = answer(Try(("probe", "-o", str(full / "old.toml"))), tmp_path)
    assert_told(done, "old.toml", "space")
    assert done.cpu_s < 2 and sorted(path.name for path in full.iterdir()) == before


def test_a_store_that_finds_no_room_keeps_its_rows(full: Path, rows: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv", packaged_table().measurements)
    for arguments in (
        ("store", str(full / "s.sqlite"), "merge", str(rows)),
        ("import", str(tmp_path / "t.csv"), "--into", str(full / "s.sqlite")),
        ("store", str(full / "new.sqlite"), "merge", str(rows)),
    ):
        assert_told(answer(Try(arguments), tmp_path), "sqlite", "space")
    (full / "filler").unlink()
    with Store(full / "s.sqlite") as store:
        assert len(store.measurements()) == 1
