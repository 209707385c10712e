"""A hostile log, table, profile or store gives one line; nothing in it runs, and nothing is written outside."""

from __future__ import annotations

import os
import pickle
import random
import sqlite3
import time
from pathlib import Path

import pytest

from command import run
from trimaran.nouns.noun import TrimaranError
from trimaran.store import Store
from trimaran.store.importers import text
from trimaran.store.importers.formats import Asked, import_file
from trimaran.store.importers.profile import typed_cells

SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 256, "mbs": 1, "gbs": 8}
LINE = " iteration {} / 9 | elapsed time per iteration (ms): {} | global batch size: {} | lm loss: {} |\n"


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("pwned",)


def attempt(path: Path) -> str:
    """The one line that an import ends in, or its rows."""
    try:
        found = import_file(path, Asked(given=typed_cells(SHAPE)))
    except TrimaranError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return str(error)
    return f"{len(found.rows)} rows"


def test_a_pickle_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("log.pt", "log.csv", "log.md"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
        assert "no format" in attempt(tmp_path / name)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 4096,
        bytes(range(256)) * 64,
        b"| a | b |\n| - | - |\n" + b"|" * 60_000,
        b"# " + b" " * 60_000 + b"x\n",
        b"| " + b"9" * 30_000 + b" |\n|-|\n| " + b"9" * 30_000 + b" |\n",
        b"| Nodes | Mem |\n|--|--|\n" + b"| 4 | " + b"1" * 900 + b"ms |\n",
        b"| Nodes | Sec/it |\n|--|--|\n| 1e999 | -1e999 |\n| \xff | nan |\n",
        b"{" * 50_000,
        b'{"iteration": 1, "sec_per_it": ' + b"[" * 30_000 + b"}",
        b"***** Running training *****\n  Instantaneous batch size per device = 4\n{'loss': 1.0}\n",
        b"Building device mesh with parallelism: dp_shard=1, tp=0\nstep:  1  loss:  1.0  memory:  1.0GiB  tps: 9\n",
        b'{"iteration": 1, "sec_per_it": 1e999, "global_batch": -3}',
        LINE.format(1, "9" * 30, "9" * 30, "1e999").encode(),
        LINE.format(1, "-5", "-7", "nan").encode() * 3,
        b" hidden_size " + b"." * 60_000 + b"\n" + LINE.format(1, "5", "8", "2").encode(),
        b"step:  1  loss: 1 " + b"memory: " * 7000 + b"tps: 1\n",
        b"iteration: 1 / 2 | elapsed_time_per_iteration_ms: " + b"9" * 60_000,
        b"layers,hidden,mbs\n" + b"," * 60_000,
        b"layers,hidden,heads,seq_len,vocab,mbs,gbs\n" + b'"' * 50_001,
        b"layers,hidden,heads,seq_len,vocab,mbs,gbs,sec_per_it\n1e300,2,2,2,2,2,2,1e-300\n",
    ],
)
def test_garbage_ends_soon_in_rows_or_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(content)
    started = time.process_time()
    assert attempt(path)
    # a pattern that backtracks would take minutes here
    assert time.process_time() - started < 5.0


def test_sizes_beyond_the_limits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "huge.log"
    path.write_text("x" * (text.MAX_LINE + 1))
    assert "65537 characters" in attempt(path)
    monkeypatch.setattr(text, "MAX_BYTES", 2**20)
    with path.open("wb") as file:
        file.truncate(2**20 + 1)
    assert "has 1 MiB, more than the 1 MiB that are read: keep the lines" in attempt(path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, says in (("pipe", "not a regular file"), ("", "not a regular file"), ("absent", "No such file")):
        assert says in attempt(tmp_path / name)
    assert "not a regular file" in attempt(Path("/dev/zero"))


def test_a_log_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "t.md"
    path.write_text("| MBS | Sec/it | Notes |\n|--|--|--|\n| 1 | 2.0 | \x1b[2J\x1b]0;owned\x07 \u202egnp.exe |\n")
    (row,) = import_file(path, Asked(given=typed_cells({**SHAPE, "mbs": 1}))).rows
    assert (row.notes or "").isprintable() and "owned" in (row.notes or "")


def test_a_foreign_store_with_views_and_triggers_runs_nothing(tmp_path: Path) -> None:
    path, own = tmp_path / "foreign.sqlite", tmp_path / "own.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE measurement RENAME TO kept")
        connection.execute("CREATE VIEW measurement AS SELECT *, load_extension('evil') FROM kept")
    done = run("store", str(own), "merge", str(path))
    assert done.returncode in (0, 2) and "Traceback" not in done.stderr
    with Store(own) as store:
        assert store.measurements() == []
    (tmp_path / "text.sqlite").write_text("not a store")
    done = run("store", str(own), "merge", str(tmp_path / "text.sqlite"))
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1


def test_a_template_of_a_profile_reads_columns_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('[set]\ncomparable_group = "{layers}-{layers.__class__}-{__import__}"\n')
    (tmp_path / "t.md").write_text("| MBS | Sec/it |\n|--|--|\n| 1 | 2.0 |\n")
    from trimaran.store.importers.profile import load_profile

    asked = Asked(load_profile(str(tmp_path / "p.toml")), typed_cells(SHAPE))
    (row,) = import_file(tmp_path / "t.md", asked).rows
    assert row.comparable_group == "2-{layers.__class__}-{__import__}"


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("CREATE TRIGGER t AFTER INSERT ON measurement BEGIN DELETE FROM measurement; END", "trigger 't'"),
        ("CREATE VIEW v AS SELECT * FROM measurement", "view 'v'"),
    ],
)
def test_a_store_with_triggers_or_views_is_refused_by_name(tmp_path: Path, statement: str, kind: str) -> None:
    path = tmp_path / "foreign.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    with pytest.raises(TrimaranError, match=kind):
        Store(path)
    done = run("store", str(tmp_path / "own.sqlite"), "merge", str(path))
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and kind in done.stderr


@pytest.mark.parametrize(
    "form", ["tensorboard", "megatron", "deepspeed", "torchtitan", "nanotron", "nemo", "olmo-core", "hugging-face"]
)
def test_a_file_with_nothing_of_a_run_gives_no_row_whatever_is_stated_of_it(tmp_path: Path, form: str) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(random.Random(1).randbytes(4096))
    found = import_file(tmp_path / "events.out.tfevents.1", Asked(given=typed_cells(SHAPE)), form)
    assert found.rows == ()
    (said,) = found.refused
    assert "--as" in said and "\n" not in said
