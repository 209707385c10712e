"""Claims about the results store, tested on real files and real processes."""

from __future__ import annotations

import csv
import multiprocessing
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster, Device, Link
from trimaran.nouns.columns import COLUMNS
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.store import Store, claims, export_csv, trial_key
from trimaran.store.schema import MIGRATIONS, VERSION
from trimaran.store.shared_rows import is_shared


def row(key: str | None = "k", **fields: object) -> Measurement:
    stated = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 256, "mbs": 1, "gbs": 8}
    return Measurement.model_validate({**stated, "trial_key": key, **fields})


def one_line(error: pytest.ExceptionInfo[TrimaranError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_row_comes_back_as_it_went_in(tmp_path: Path) -> None:
    stored = row(
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
        store.add(row(status="hang"))
        store.add(row("other"))
        store.add(row(status="ok", sec_per_it=1.0))
        assert [(m.trial_key, m.status) for m in store.measurements()] == [("other", "ok"), ("k", "ok")]
        assert len(store.measurements(every_attempt=True)) == 3
        assert store.attempts("k") == 2


def test_published_rows_have_no_trial_and_do_not_replace_each_other(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        store.add(row(None, source="004"))
        store.add(row(None, source="004", recipe="r"))
        assert len(store.measurements()) == 2
        assert [m.recipe for m in store.measurements(recipe="r")] == ["r"]


def test_a_claim_keeps_other_processes_out_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    script = f"from trimaran.store import Store; print(Store({str(path)!r}).claim('k'))"

    def claimed_elsewhere() -> bool:
        return subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "True"

    with Store(path) as store:
        assert store.claim("k")
        assert not claimed_elsewhere()
        store.release("k")
        assert claimed_elsewhere()
        assert store.claim("k"), "the claim of a process that has ended is taken over"
        store.add(row())
        assert not store.claim("k"), "a run stored since the caller looked ends the matter"
        assert store.claim("k", attempts_seen=1), "a retry says how many runs it has seen"


def test_a_claim_lasts_as_long_as_its_heartbeat_whatever_its_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LOST_AFTER_S", 1.0)
    a_day_ago = time.time() - 86400
    with Store(tmp_path / "s.sqlite") as far_away, Store(tmp_path / "s.sqlite") as store:
        assert far_away.claim("k")
        (claim,) = (tmp_path / "s.sqlite.claims").iterdir()
        claim.write_text(re.sub('"namespace":"[^"]*"', '"namespace":"another boot"', claim.read_text()))
        for beat in range(8):
            os.utime(claim, (a_day_ago + beat, a_day_ago + beat))
            assert not store.claim("k")
            time.sleep(0.25)
        assert far_away.holds("k")
        time.sleep(1.1)
        assert store.claim("k"), "its heartbeat has stopped"
        assert not far_away.holds("k"), "who was taken for dead learns that it lost its claim"


HOLD = """
import sys; from trimaran.store import Store
store = Store(sys.argv[1]); print(store.claim("k"), flush=True); input()
"""


@pytest.mark.skipif(os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="makes a namespace of processes")
def test_another_container_under_the_same_host_name_does_not_steal_a_living_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LOST_AFTER_S", 1.2)
    path = tmp_path / "s.sqlite"
    holder = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "TRIMARAN_LOST_AFTER_S": "1.2"},
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    with Store(path) as store:
        began = time.monotonic()
        while time.monotonic() - began < 2.5:
            assert not store.claim("k")
            time.sleep(0.1)
        holder.kill()
        holder.communicate()
        while not store.claim("k"):
            assert time.monotonic() - began < 30
            time.sleep(0.1)


def _claim_and_add(path: Path, worker: int, ready: multiprocessing.Barrier, won: multiprocessing.Queue) -> None:
    ready.wait()
    store = Store(path)  # all processes make the file at the same moment
    for trial in range(20):
        if store.claim(f"t{trial}"):
            store.add(row(f"t{trial}", seed=worker))
            won.put((trial, worker))


def test_two_sweeps_at_once_run_each_trial_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, won = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_claim_and_add, args=(tmp_path / "s", n, ready, won)) for n in range(4)]
    for worker in workers:
        worker.start()
    winners = [won.get(timeout=60) for _ in range(20)]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    with Store(tmp_path / "s") as store:
        rows = store.measurements(every_attempt=True)
    assert sorted(trial for trial, _ in winners) == list(range(20))
    assert sorted(m.trial_key or "" for m in rows) == sorted(f"t{n}" for n in range(20))


def _claim_and_add_without_locks(
    path: Path, worker: int, ready: multiprocessing.Barrier, won: multiprocessing.Queue
) -> None:
    connect = sqlite3.connect

    def without_locks(name: str, **options: Any) -> sqlite3.Connection:
        """SQLite's own way to do without any lock, as on a file system whose locks do not work."""
        if name != ":memory:":
            name, options["uri"] = f"file:{name}?vfs=unix-none", True
        return connect(name, **options)

    sqlite3.connect = without_locks  # in this process alone
    _claim_and_add(path, worker, ready, won)


def test_hosts_that_share_a_file_system_whose_locks_do_not_work_lose_and_repeat_nothing(tmp_path: Path) -> None:
    (tmp_path / "s.rows").mkdir()  # as on a file system that is known to be shared
    context = multiprocessing.get_context("fork")
    ready, won = context.Barrier(4), context.Queue()
    workers = [
        context.Process(target=_claim_and_add_without_locks, args=(tmp_path / "s", number, ready, won))
        for number in range(4)
    ]
    for worker in workers:
        worker.start()
    winners = [won.get(timeout=60) for _ in range(20)]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sorted(trial for trial, _ in winners) == list(range(20))
    with Store(tmp_path / "s", create=False) as store:
        rows = store.measurements(every_attempt=True)
        assert sorted(m.trial_key or "" for m in rows) == sorted(f"t{n}" for n in range(20))
        assert {(m.trial_key, m.seed) for m in rows} == {(f"t{trial}", worker) for trial, worker in winners}
        # what another process adds is seen by one that has the store open
        with Store(tmp_path / "s") as other:
            assert other.add_new([row("t0", seed=9), *rows]) == 1
        assert store.attempts("t0") == 2
    # a process that is killed in the middle of a row leaves a line that is not finished
    (tmp_path / "s.rows/killed-1-x.jsonl").write_text(rows[0].model_dump_json()[:50])
    with Store(tmp_path / "s") as store:
        assert len(store.measurements(every_attempt=True)) == 21


def test_rows_of_a_store_that_was_alone_stay_when_its_file_system_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Store(path) as store:
        store.add(row("a", sec_per_it=1.5))
        (tmp_path / "s.rows").mkdir()
        with Store(path) as shared:  # while the other still has its write-ahead log
            shared.add(row("b", sec_per_it=2.5))
            assert [m.sec_per_it for m in shared.measurements()] == [1.5, 2.5]


def test_shared_file_systems_are_known_by_the_table_of_mounts(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"36 22 0:31 / {tmp_path}/home rw,relatime shared:2 master:1 - nfs4 server:/home rw,vers=4.2\n"
        f"37 36 0:32 / {tmp_path}/home/my\\040disk rw - xfs /dev/sdb1 rw\n"
    )
    assert [is_shared(tmp_path / name, mounts) for name in ("", "home", "home/runs", "home/my disk/runs", "homes")] == [
        False, True, True, False, False
    ]  # fmt: skip


def test_kill_9_loses_no_row_that_add_returned_for(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    script = (
        "import sys; from trimaran.store import Store; from trimaran.nouns.measurement import Measurement\n"
        f"store = Store({str(path)!r}); n = store.attempts('k')\n"
        "while True:\n"
        "    n += 1\n"
        "    store.add(Measurement(layers=1, hidden=1, heads=1, seq_len=1, vocab=2, mbs=1, gbs=1, trial_key='k'))\n"
        "    print(n, flush=True)\n"
    )
    for round_number in range(5):
        writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(5)]
        time.sleep(0.003 * round_number)
        writer.send_signal(signal.SIGKILL)
        said += [int(line) for line in writer.stdout.read().split()]
        writer.wait()
        with Store(path) as store:
            assert store.attempts("k") - said[-1] in (0, 1)  # one may be stored and not yet told
            assert len(store.measurements(every_attempt=True)) == store.attempts("k")


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
            store.add(row(f"k{n}", evidence="x" * 2000))
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
            store.add(row())
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
        store.add(row("a", sec_per_it=1.5))
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
        store.add(row("b", sec_per_it=2.5))
    assert "later" in columns()
    with Store(path) as store:  # a second opening finds nothing to do
        assert len(store.measurements()) == 2
    with sqlite3.connect(path) as connection:
        versions = connection.execute("SELECT version FROM migration ORDER BY version").fetchall()
    assert [version for (version,) in versions] == list(range(1, VERSION + 2))


@pytest.mark.skipif(os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="needs to mount a disk read-only")
def test_a_store_on_a_read_only_disk_can_be_read(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    try:
        with Store(disk / "s.sqlite") as store:
            store.add(row("a", sec_per_it=1.5))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with Store(disk / "s.sqlite", create=False) as store:
            assert [found.sec_per_it for found in store.measurements()] == [1.5]
            with pytest.raises(TrimaranError, match="cannot be written") as error:
                store.add(row("b"))
            one_line(error)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_new_store_does_not_take_the_name_of_a_table(tmp_path: Path) -> None:
    with pytest.raises(TrimaranError, match=r"name it x\.sqlite"):
        Store(tmp_path / "x.csv")
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.skipif(os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="needs to mount a small disk")
def test_a_full_disk_is_one_line_and_keeps_the_rows_before_it(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        kept = 0
        with Store(disk / "s.sqlite") as store:
            with pytest.raises(TrimaranError, match="full") as error:
                while True:
                    store.add(row(f"k{kept}", evidence="x" * 20_000))
                    kept += 1
            one_line(error)
        assert kept > 5
        with Store(disk / "s.sqlite") as store:
            assert len(store.measurements()) == kept
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_exported_tables_have_the_columns_of_the_contract(tmp_path: Path) -> None:
    rows = [row(sec_per_it=0.125, notes='says "so", twice'), row(status="oom", mem_gib=3)]
    assert export_csv(iter(rows), tmp_path / "t.csv") == 2
    with (tmp_path / "t.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == [column.name for column in COLUMNS]
    assert (read[0]["sec_per_it"], read[0]["notes"], read[0]["mem_gib"]) == ("0.125", 'says "so", twice', "")
    assert (read[1]["status"], read[1]["mem_gib"]) == ("oom", "3.0")
    with pytest.raises(TrimaranError) as error:
        export_csv(rows, tmp_path / "t.csv" / "below-a-file.csv")
    one_line(error)


LINK = Link(bandwidth_gbps=10, latency_us=1)
CLUSTER = Cluster(
    device=Device(name="cpu", kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=4, mem_bandwidth_gb_s=10, cores=1),
    nodes=1, devices_per_node=4, intra=LINK, inter=LINK, cores_per_node=2,
)  # fmt: skip
WORKLOAD = Workload(model=Model(layers=4, hidden=64, heads=4, vocab=256), seq_len=32, global_batch=8)


def key(
    layout: str = "dp2,mbs1", workload: Workload = WORKLOAD, cluster: Cluster = CLUSTER, steps: int = 6, **other: Any
) -> str:
    parsed: Layout = parse_layout(layout)
    split = parsed.stage_split or ((4,) if parsed.pp == 1 else (2, 2))
    return trial_key(workload, parsed, Stack(name="s"), cluster, stage_split=split, steps=steps, **other)


def test_a_trial_is_the_same_after_another_probe_and_under_another_name() -> None:
    device = CLUSTER.device.model_copy(update={"peak_tflops": {"fp32": 0.11}, "mem_bandwidth_gb_s": 11.0})
    assert key(cluster=CLUSTER.model_copy(update={"device": device, "source": "probe"})) == key()
    named = WORKLOAD.model_copy(update={"model": WORKLOAD.model.model_copy(update={"name": "mine"}), "tokens": 5000})
    assert key(workload=named) == key()
    assert key("dp1,pp2,mbs1") == key("dp1,pp2,mbs1,split2-2")


def test_trials_that_differ_in_anything_that_matters_have_different_keys() -> None:
    other_device = CLUSTER.model_copy(update={"device": CLUSTER.device.model_copy(update={"cores": 2})})
    keys = [
        key(), key("dp2,mbs2"), key("dp2,mbs1,recompute-full"), key("dp1,pp2,mbs1"), key("dp1,pp2,mbs1,split3-1"),
        key(steps=7), key(variant="OMP_NUM_THREADS=2"), key(cluster=other_device),
        key(warmup_steps=3), key(document_mask=True),
        key(workload=WORKLOAD.model_copy(update={"global_batch": 16})),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


def test_an_empty_file_is_no_store_and_stays_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite"
    path.touch()
    with pytest.raises(TrimaranError, match="0 bytes"):
        Store(path, create=False)
    assert path.stat().st_size == 0


def test_a_trial_of_an_earlier_version_keeps_its_key() -> None:
    workload = Workload(model=load_model("gpt2-124m"), seq_len=1024, global_batch=16)
    layout = parse_layout("dp2,tp2,pp2,mbs1,zero1,sp,bf16")
    cluster, stack = load_cluster("dgx-a100-80gb"), load_stack("trimaran")
    assert (
        trial_key(workload, layout, stack, cluster, stage_split=(6, 6), steps=6) == "f637fc1844c8dc6f1bd2dacf2a995b00"
    )


def _peak_mib_and_cpu_s(*arguments: str) -> tuple[float, float]:
    """What one run of the command line takes; the processor's time, since others share the machine."""
    code = (
        "import resource, sys; from trimaran.cli import main\n"
        "try:\n    main()\nfinally:\n    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    print(used.ru_maxrss / 1024, used.ru_utime + used.ru_stime, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, seconds = done.stderr.split()[-2:]
    return float(peak), float(seconds)


@pytest.mark.proof
def test_a_hundred_thousand_rows_are_imported_merged_listed_and_exported_within_20_s_and_500_mib(
    tmp_path: Path,
) -> None:
    rows = [row(None, sec_per_it=0.5 + n / 1024, table=f"T{n // 500}", row=str(n), source="s") for n in range(500)]
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
        peak_mib, seconds = _peak_mib_and_cpu_s(*arguments)
        assert peak_mib < 500 and seconds < 20, (arguments, peak_mib, seconds)
    with Store(b) as store:
        assert store.count() == 100_000
