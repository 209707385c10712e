"""Claims about the results store, tested on real files and real processes."""

from __future__ import annotations

import csv
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from small_disk import mounted
from store_rows import one_line, row_of
from trimaran.nouns.columns import COLUMNS
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.store import Store, export_csv
from trimaran.store.filter import parse_condition
from trimaran.store.schema import MIGRATIONS, VERSION


def test_a_row_comes_back_as_it_went_in(tmp_path: Path) -> None:
    stored = row_of(
        status="oom", mem_gib=1.25, sec_per_it=0.1 + 0.2, step_times_s=(0.3, 1e-9), losses=(10.5, 2.25),
        mem_gib_per_rank=(1.0, 1.25), libraries={"torch": "2.13"}, environment={"LD_PRELOAD": "a;b'\"="},
        evidence="line 1\nline 2 \u2603", notes="", table="7",
    )  # fmt: skip
    with Store(tmp_path / "new folder" / "s.sqlite") as store:
        store.add(stored)
    with Store(tmp_path / "new folder" / "s.sqlite") as store:
        assert store.measurements() == [stored]
        assert store.trial("k") == stored
        assert store.trial("other") is None


def test_every_field_of_a_measurement_has_its_column(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite"):
        columns = {line[1] for line in sqlite3.connect(tmp_path / "s.sqlite").execute("PRAGMA table_info(measurement)")}
    assert columns == set(Measurement.model_fields) | {"id", "attempt"}


def test_a_trial_run_again_adds_an_attempt_and_the_last_one_counts(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        store.add(row_of(status="hang"))
        store.add(row_of("other"))
        store.add(row_of(status="ok", sec_per_it=1.0))
        assert [(m.trial_key, m.status) for m in store.measurements()] == [("other", "ok"), ("k", "ok")]
        assert len(store.measurements(every_attempt=True)) == 3
        assert store.attempts("k") == 2


def made(day: str, status: str, **fields: object) -> Measurement:
    return row_of(status=status, created_at=f"2026-{day}T10:00:00+00:00", **fields)


@pytest.mark.parametrize("shared", [False, True], ids=["of this machine", "of several hosts"])
def test_of_a_trial_that_two_stores_hold_the_run_made_last_counts_whichever_is_merged_into_the_other(
    tmp_path: Path, shared: bool
) -> None:
    today = [made("11-27", "ok", sec_per_it=1.0), row_of("other")]
    before = [made("10-27", "hang"), made("09-27", "oom"), made("10-28", "fail"), row_of(status="lost")]
    for name, rows, others in (("now", today, before), ("old", before, today)):
        with Store(tmp_path / name) as store:
            for row in rows:
                store.add(row)
        if shared:
            (tmp_path / f"{name}.rows").mkdir()
        with Store(tmp_path / name) as store:
            assert store.add_new(others) == len(others)
        with Store(tmp_path / name) as store:
            assert store.trial("k") == today[0]
            assert sorted((m.trial_key, m.status) for m in store.measurements()) == [("k", "ok"), ("other", "ok")]
            attempts = sorted((run.attempt, run.measurement.status) for run in store.runs(every_attempt=True))
            ran_here = ["hang", "oom", "fail"] if name == "old" else ["oom", "hang", "fail"]
            # who does not say when stays where it was stored, and is the oldest of what is merged
            order = [*ran_here, "lost", "ok"] if name == "old" else ["lost", *ran_here, "ok"]
            assert attempts == sorted([(1, "ok"), *enumerate(order, 1)])
            assert store.attempts("k") == 5, "a sweep that was asked to try again sees how often it was tried"
            store.add(made("11-28", "hang"))
            assert store.trial("k") == made("11-28", "hang")


@pytest.mark.parametrize("day", ["11-27", "11-28"])
def test_a_trial_run_again_counts_where_the_clock_of_the_host_before_was_ahead(tmp_path: Path, day: str) -> None:
    (tmp_path / "s.sqlite.rows").mkdir()
    with Store(tmp_path / "s.sqlite") as ahead, Store(tmp_path / "s.sqlite") as other:
        ahead.add(made("11-28", "fail"))
        other.add(made(day, "hang"))
        other.add(made(day, "ok"))
        for store in (ahead, other):
            assert [run.measurement.status for run in store.runs(every_attempt=True)] == ["fail", "hang", "ok"]
    for _ in range(2):
        with Store(tmp_path / "s.sqlite") as again:
            last = again.trial("k")
            assert last is not None and (last.status, again.attempts("k")) == ("ok", 3)


def test_published_rows_have_no_trial_and_do_not_replace_each_other(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        store.add(row_of(None, source="004"))
        store.add(row_of(None, source="004", recipe="r"))
        assert len(store.measurements()) == 2
        assert [m.recipe for m in store.measurements(recipe="r")] == ["r"]


def test_a_file_that_is_no_store_is_refused_in_one_line_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to look like a page\n" * 100)
    before = text.read_bytes()
    with pytest.raises(TrimaranError) as error:
        Store(text)
    assert str(text) in one_line(error)
    assert text.read_bytes() == before

    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE birds (name TEXT)")
    with pytest.raises(TrimaranError, match="another program"):
        Store(foreign)

    with pytest.raises(TrimaranError, match="does not exist"):
        Store(tmp_path / "absent", create=False)
    with pytest.raises(TrimaranError) as error:
        Store(text / "below a file")
    one_line(error)


def test_a_damaged_store_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        for n in range(50):
            store.add(row_of(f"k{n}", evidence="x" * 2000))
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in range(4096, size, 4096):
            file.seek(offset)
            file.write(os.urandom(1024))
    with pytest.raises(TrimaranError) as error, Store(path) as store:
        store.measurements()
    assert str(path) in one_line(error)


def test_a_damaged_row_is_named_by_its_number(tmp_path: Path) -> None:
    for assignment in ("status = 'great'", "losses = '[1,'", "libraries = '[]'", "hidden = 'wide'"):
        path = tmp_path / f"{abs(hash(assignment))}.sqlite"
        with Store(path) as store:
            store.add(row_of())
            with sqlite3.connect(path) as other:
                other.execute(f"UPDATE measurement SET {assignment}")
            with pytest.raises(TrimaranError, match="row 1 is damaged") as error:
                store.measurements()
            one_line(error)


def test_a_store_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(TrimaranError, match=re.escape(f"reads up to {VERSION}")):
        Store(path)


def test_an_older_store_is_migrated_with_its_rows_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.add(row_of("a", sec_per_it=1.5))
    good = ("ALTER TABLE measurement ADD COLUMN later TEXT", "CREATE INDEX by_key ON measurement (trial_key)")
    broken = ("ALTER TABLE measurement ADD COLUMN half TEXT", "no SQL")

    def release(*migrations: tuple[str, ...]) -> None:
        monkeypatch.setattr("trimaran.store.schema.MIGRATIONS", MIGRATIONS + migrations)
        for module in ("schema", "database"):
            monkeypatch.setattr(f"trimaran.store.{module}.VERSION", VERSION + len(migrations))

    def columns() -> set[str]:
        with sqlite3.connect(path) as connection:
            return {line[1] for line in connection.execute("PRAGMA table_info(measurement)")}

    release(good, broken)
    with pytest.raises(TrimaranError):
        Store(path)
    assert not {"later", "half"} & columns()
    release(good)
    with Store(path) as store:
        assert [found.sec_per_it for found in store.measurements()] == [1.5]
        store.add(row_of("b", sec_per_it=2.5))
    assert "later" in columns()
    with Store(path) as store:  # a second opening finds nothing to do
        assert len(store.measurements()) == 2
    with sqlite3.connect(path) as connection:
        versions = connection.execute("SELECT version FROM migration ORDER BY version").fetchall()
    assert [version for (version,) in versions] == list(range(1, VERSION + 2))


def test_a_store_on_a_read_only_disk_can_be_read(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "2m") as disk:
        with Store(disk / "s.sqlite") as store:
            store.add(row_of("a", sec_per_it=1.5))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with Store(disk / "s.sqlite", create=False) as store:
            assert [found.sec_per_it for found in store.measurements()] == [1.5]
            with pytest.raises(TrimaranError, match="cannot be written") as error:
                store.add(row_of("b"))
            one_line(error)


READ_BY_ANOTHER = """
import os
from trimaran.nouns.noun import TrimaranError
from trimaran.store import Store
os.setuid(65534)
try:
    Store("s.sqlite", create=False)
except TrimaranError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_store_that_may_not_be_read_is_not_said_to_be_one_that_cannot_be_written(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        store.add(row_of("a", sec_per_it=1.5))
    (tmp_path / "s.sqlite").chmod(0o600)
    tmp_path.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", READ_BY_ANOTHER], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "store s.sqlite cannot be read: check its permissions\n"


def test_a_store_that_stays_locked_names_both_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite says the same of a lock that another holds and of a file system that gives none."""
    monkeypatch.setattr("trimaran.store.database.BUSY_TIMEOUT_S", 0.1)
    with Store(tmp_path / "s.sqlite") as store:
        other = sqlite3.connect(tmp_path / "s.sqlite")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TrimaranError, match=r"end the process that holds it, or .* keeps no locks") as error:
            store.add(row_of("other"))
        other.close()
    one_line(error)


@pytest.mark.parametrize("name", ["x.csv", "x.CSV", "x.TOML"])
def test_a_new_store_does_not_take_the_name_of_a_table(tmp_path: Path, name: str) -> None:
    with pytest.raises(TrimaranError, match=r"name it x\.sqlite"):
        Store(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_full_disk_is_one_line_and_keeps_the_rows_before_it(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "1m") as disk:
        kept = 0
        with Store(disk / "s.sqlite") as store:
            with pytest.raises(TrimaranError, match="full") as error:
                while True:
                    store.add(row_of(f"k{kept}", evidence="x" * 20_000))
                    kept += 1
            one_line(error)
        assert kept > 5
        with Store(disk / "s.sqlite") as store:
            assert len(store.measurements()) == kept


def test_exported_tables_have_the_columns_of_the_contract(tmp_path: Path) -> None:
    rows = [row_of(sec_per_it=0.125, notes='says "so", twice'), row_of(status="oom", mem_gib=3)]
    assert export_csv(iter(rows), tmp_path / "t.csv") == 2
    with (tmp_path / "t.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == [column.name for column in COLUMNS]
    assert (read[0]["sec_per_it"], read[0]["notes"], read[0]["mem_gib"]) == ("0.125", 'says "so", twice', "")
    assert (read[1]["status"], read[1]["mem_gib"]) == ("oom", "3.0")
    with pytest.raises(TrimaranError) as error:
        export_csv(rows, tmp_path / "t.csv" / "below-a-file.csv")
    one_line(error)


def test_an_empty_file_is_no_store_and_stays_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite"
    path.touch()
    with pytest.raises(TrimaranError, match="0 bytes"):
        Store(path, create=False)
    assert path.stat().st_size == 0


def _peak_mib(*arguments: str) -> float:
    """What one run of the command line takes of the memory; `resource` would tell this process's peak, being higher."""
    code = (
        "import sys; from trimaran.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print(open('/proc/self/status').read(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert peak is not None
    return int(peak[1]) / 1024


@pytest.mark.proof
def test_a_hundred_thousand_rows_are_imported_merged_listed_and_exported_within_500_mib(tmp_path: Path) -> None:
    rows = [row_of(None, sec_per_it=0.5 + n / 1024, table=f"T{n // 500}", row=str(n), source="s") for n in range(500)]
    export_csv(rows, tmp_path / "some.csv")
    header, *lines = (tmp_path / "some.csv").read_text().splitlines()
    table = tmp_path / "t.csv"
    table.write_text("\n".join([header, *(line.replace("s,", f"s{n},", 1) for n in range(200) for line in lines)]))
    a, b = str(tmp_path / "a.sqlite"), str(tmp_path / "b.sqlite")
    for arguments in (
        ("import", str(table), "--into", a),
        ("store", b, "merge", a),
        ("store", a, "list"),
        ("store", a, "export", "-o", str(tmp_path / "x.csv")),
        ("store", a, "export", "-o", str(tmp_path / "x.parquet")),
    ):
        peak_mib = _peak_mib(*arguments)
        assert peak_mib < 500, (arguments, peak_mib)
    with Store(b) as store:
        assert store.count() == 100_000


def test_a_file_that_is_no_store_is_told_what_one_is(tmp_path: Path) -> None:
    """It was to be moved away, which nobody wants of a README."""
    (tmp_path / "README.md").write_text("# A page of text\n" * 100)
    with pytest.raises(TrimaranError, match=r"it is not a store, or damaged .*: name one that bench, tune or import"):
        Store(tmp_path / "README.md", create=False)


@pytest.mark.parametrize("ending", ["wal", "journal"])
def test_a_folder_by_the_name_of_sqlites_own_file_is_named(tmp_path: Path, ending: str) -> None:
    """Permissions and the disk were blamed for it."""
    Store(tmp_path / "s.sqlite").close()
    (tmp_path / f"s.sqlite-{ending}").mkdir()
    with pytest.raises(TrimaranError, match=rf"s.sqlite-{ending} is none: move that away"):
        Store(tmp_path / "s.sqlite", create=False)


def test_a_part_of_a_word_is_asked_for_in_columns_of_words_and_of_numbers_too(tmp_path: Path) -> None:
    """`precision~bf` was refused, since bf is no precision."""
    with Store(tmp_path / "s.sqlite") as store:
        store.add_new([row_of("a", precision="bf16", zero_stage=0), row_of("b", precision="fp32", zero_stage=1)])
        for condition in ("precision~bf", "precision~BF", "zero_stage~0"):
            (run,) = store.chosen([parse_condition(condition)])
            assert run.measurement.trial_key == "a"
        assert [*store.chosen([parse_condition("recompute~core_attn+")])] == []
    with pytest.raises(TrimaranError, match="'presicion' is not a column"):
        parse_condition("presicion~bf")


def test_a_damaged_row_of_several_hosts_is_named_by_its_line_and_again_when_it_is_asked_for_again(
    tmp_path: Path,
) -> None:
    """Lines were counted from where the process had read on, and a second look passed over what it had not taken in."""
    (tmp_path / "s.sqlite.rows").mkdir()
    rows = tmp_path / "s.sqlite.rows" / "host-1.jsonl"
    with Store(tmp_path / "s.sqlite") as store:
        rows.write_text("".join(row_of(key).model_dump_json() + "\n" for key in "ab"))
        assert store.count() == 2
        with rows.open("a") as file:
            file.write(row_of("c").model_dump_json() + "\n" + '{"layers": 2}\n')
        for _ in range(2):
            with pytest.raises(TrimaranError, match=r"host-1\.jsonl, line 4: ") as error:
                store.count()
            one_line(error)
        rows.write_text("".join(row_of(key).model_dump_json() + "\n" for key in "abcd"))
        assert store.count() == 4
