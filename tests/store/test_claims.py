"""Claims of trials, and stores that processes and hosts share: none repeats a trial, none loses a row."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from store_rows import row_of
from trimaran.nouns.noun import TrimaranError
from trimaran.store import Store, claims
from trimaran.store.shared_rows import is_shared


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
        store.add(row_of())
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


def test_who_holds_a_claim_is_known_and_whether_that_process_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    with Store(path) as store:
        assert store.holder("other") is None
        owner = store.holder("k")
        assert owner is not None and owner.pid == holder.pid and not owner.is_stopped()
        holder.send_signal(signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)
        assert owner.is_stopped() and not store.claim("k")
        elsewhere = owner.model_copy(update={"namespace": "another boot"})
        assert not elsewhere.is_stopped(), "the number of its process says nothing here"
        holder.send_signal(signal.SIGCONT)
        holder.communicate("")
        assert not owner.is_stopped()


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


ASK = "import sys; from trimaran.store import Owner; print(Owner.model_validate_json(sys.argv[1]).is_alive())"
# A /proc that shows to each user the processes of that user alone, as login nodes have it.
HIDING = ("unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh")
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.mark.skipif(os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="starts another user's process")
def test_a_process_that_another_user_may_not_see_is_not_taken_for_dead() -> None:
    """Its claim of the machine was taken over at once, and both sweeps measured each other."""
    if subprocess.run([*HIDING, *NOBODY, sys.executable, "-c", "import trimaran"], check=False).returncode:
        pytest.skip("needs to mount, and an interpreter that all users may read")
    dead = subprocess.Popen(["true"])
    ended = claims.Owner.current().model_copy(update={"pid": dead.pid})
    dead.wait()
    for owner, alive in ((claims.Owner.current(), "None"), (ended, "False")):
        told = subprocess.check_output(
            [*HIDING, *NOBODY, sys.executable, "-c", ASK, owner.model_dump_json()], text=True
        )
        assert told.strip() == alive


def _claim_and_add(path: Path, worker: int, ready: multiprocessing.Barrier, won: multiprocessing.Queue) -> None:
    ready.wait()
    store = Store(path)  # all processes make the file at the same moment
    for trial in range(20):
        if store.claim(f"t{trial}"):
            store.add(row_of(f"t{trial}", seed=worker))
            won.put((trial, worker))


def _winners_of_four(work: Callable[..., None], path: Path) -> list[tuple[int, int]]:
    """(trial, worker) of the twenty trials that four processes, at work at once, have won."""
    context = multiprocessing.get_context("fork")
    ready, won = context.Barrier(4), context.Queue()
    workers = [context.Process(target=work, args=(path, number, ready, won)) for number in range(4)]
    for worker in workers:
        worker.start()
    winners = [won.get(timeout=60) for _ in range(20)]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    return winners


def _take_and_give_back(folder: Path, ready: multiprocessing.Barrier, wrong: multiprocessing.Queue) -> None:
    held = claims.Claims(folder)
    ready.wait()
    for _ in range(1000):
        try:
            if held.take("k"):
                held.release("k")
        except TrimaranError as error:
            wrong.put(str(error))
    wrong.put(None)


def test_who_gives_back_the_last_claim_and_its_folder_stands_in_nobodys_way(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, wrong = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_take_and_give_back, args=(tmp_path / "claims", ready, wrong)) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert [wrong.get(timeout=60) for _ in workers] == [None] * 4
    for worker in workers:
        worker.join(60)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_under_the_name_of_the_claims_folder_is_told(tmp_path: Path, kind: str) -> None:
    there = tmp_path / "claims"
    if kind == "file":
        there.touch()
    else:
        there.symlink_to(tmp_path / "nowhere")
    with pytest.raises(TrimaranError, match="is something else than a folder: remove it"):
        claims.Claims(there).take("k")


@contextmanager
def blind_for(seconds: float) -> Iterator[None]:
    """Let this process open no file for a while, as where a network file system cannot say what it holds."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    sees_again = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_NOFILE, before))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    sees_again.start()
    try:
        yield
    finally:
        sees_again.join()


def test_a_claim_that_cannot_be_seen_for_a_moment_is_neither_lost_nor_taken_over(tmp_path: Path) -> None:
    """Its holder's figures were thrown away, and who asked for it removed it."""
    held, other = claims.Claims(tmp_path / "claims"), claims.Claims(tmp_path / "claims")
    assert held.take("k")
    with blind_for(0.3):
        assert held.holds("k")
    with blind_for(0.3):
        assert not other.take("k")
    assert held.holds("k")
    with blind_for(0.3):
        held.release("k")
    assert other.take("k"), "it was given back"
    other.close()


def test_two_sweeps_at_once_run_each_trial_once(tmp_path: Path) -> None:
    winners = _winners_of_four(_claim_and_add, tmp_path / "s")
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
    winners = _winners_of_four(_claim_and_add_without_locks, tmp_path / "s")
    assert sorted(trial for trial, _ in winners) == list(range(20))
    with Store(tmp_path / "s", create=False) as store:
        rows = store.measurements(every_attempt=True)
        assert sorted(m.trial_key or "" for m in rows) == sorted(f"t{n}" for n in range(20))
        assert {(m.trial_key, m.seed) for m in rows} == {(f"t{trial}", worker) for trial, worker in winners}
        # what another process adds is seen by one that has the store open
        with Store(tmp_path / "s") as other:
            assert other.add_new([row_of("t0", seed=9), *rows]) == 1
        assert store.attempts("t0") == 2
    # a process that is killed in the middle of a row leaves a line that is not finished
    (tmp_path / "s.rows/killed-1-x.jsonl").write_text(rows[0].model_dump_json()[:50])
    with Store(tmp_path / "s") as store:
        assert len(store.measurements(every_attempt=True)) == 21


def test_rows_of_a_store_that_was_alone_stay_when_its_file_system_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Store(path) as store:
        store.add(row_of("a", sec_per_it=1.5))
        (tmp_path / "s.rows").mkdir()
        with Store(path) as shared:  # while the other still has its write-ahead log
            shared.add(row_of("b", sec_per_it=2.5))
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


@pytest.mark.parametrize("kind", ["fuse.ceph-fuse", "fuse.daos", "fuse.hf3fs", "fuse.quobyte"])
def test_a_shared_file_system_behind_fuse_is_known_by_what_the_table_of_mounts_calls_it(
    tmp_path: Path, kind: str
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"36 22 0:31 / {tmp_path}/home rw,relatime - {kind} client rw,user_id=0,allow_other\n")
    assert is_shared(tmp_path / "home/runs", mounts)


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
