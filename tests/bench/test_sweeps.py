"""Claims about sweeps: one row per trial, whatever happens to the sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from processes import bound_by_permissions
from small_disk import mounted
from trial_helpers import LIMITS, fake_worker, processes_that_name
from trimaran.bench.launch.local import LocalLauncher
from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher
from trimaran.bench.sweep import Prediction, Progress, overlong, run_sweep
from trimaran.bench.trial.trial import Trial
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store, this_boot

LAYOUTS = ["dp1,mbs1", "dp1,mbs2", "dp2,mbs1", "tp2,mbs1", "pp2,mbs1", "dp2,pp2,mbs1"]

# Processes numbered as in a container of their own.
CONTAINED = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

SWEEP = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from trial_helpers import LIMITS, fake_worker
from trimaran.bench.sweep import run_sweep
from trimaran.nouns.cluster import Cluster
from trimaran.layout.notation import parse_layout
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store, this_boot

folder = Path(sys.argv[2])
rows = run_sweep(
    Recipe.model_validate_json((folder / "recipe.json").read_text()),
    Cluster.model_validate_json((folder / "cluster.json").read_text()),
    [parse_layout(text) for text in json.loads(sys.argv[3])],
    Store(folder / "store.sqlite"),
    data_dir=folder, work_dir=folder / "runs", limits=LIMITS, worker=fake_worker(sys.argv[4]),
    on_progress=lambda p: print(p.happening, p.layout, time.monotonic(), flush=True),
)
print("rows", len(rows), *(row.status for row in rows))
"""


@pytest.fixture
def folder(recipe: Recipe, cluster: Cluster, tmp_path: Path) -> Path:
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    (tmp_path / "cluster.json").write_text(cluster.model_dump_json())
    return tmp_path


def start_sweep(
    folder: Path, behaviour: str = "ok", layouts: list[str] = LAYOUTS, *, within: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """A sweep in a process of its own, started by the command `within`."""
    script = [sys.executable, "-c", SWEEP, str(Path(__file__).parent), str(folder), json.dumps(layouts), behaviour]
    command = [*within, *script]
    environment = {**os.environ, "TRIMARAN_LOST_AFTER_S": "4"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def stored(folder: Path) -> list[Measurement]:
    with Store(folder / "store.sqlite") as store:
        return store.measurements(every_attempt=True)


def assert_no_process_is_left(folder: Path) -> None:
    deadline = time.monotonic() + 10
    while processes_that_name(str(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_that_name(str(folder)) == []


def test_trials_without_time_for_their_steps_are_counted_and_the_longest_is_named() -> None:
    trials = [(parse_layout(text), sec) for text, sec in zip(LAYOUTS[:3], (9.0, 11.0, 12.0), strict=True)]
    sentence = overlong(trials, 10, 100.0) or ""
    assert "100 s is shorter than the 10 steps of 2 of 3 trials" in sentence
    assert f"120 s of {trials[2][0]}" in sentence and "raise it" in sentence
    assert overlong(trials, 10, 120.0) is None and overlong([], 10, 1.0) is None


def test_a_sweep_killed_by_signal_9_goes_on_and_repeats_and_loses_nothing(folder: Path) -> None:
    finished = 0
    for kills in range(4):
        sweep = start_sweep(folder)
        assert sweep.stdout is not None
        said: list[str] = []
        while f"finished {kills}" != f"finished {sum(line.startswith('finished') for line in said)}":
            said.append(sweep.stdout.readline())
        said.append(sweep.stdout.readline())  # the next one has begun
        time.sleep(0.05 * kills)
        sweep.kill()
        rest, _ = sweep.communicate()
        told = sum(line.startswith("finished") for line in [*said, *rest.splitlines()])
        assert sum(line.startswith("kept") for line in said) == min(finished, len(said))
        finished = len(stored(folder))
        assert told <= finished
        assert_no_process_is_left(folder)
    out, _ = start_sweep(folder).communicate(timeout=60)
    assert out.splitlines()[-1] == "rows 6 " + " ".join(["ok"] * 6)
    rows = stored(folder)
    assert len(rows) == len({row.trial_key for row in rows}) == len(LAYOUTS)


def test_ctrl_c_leaves_finished_rows_no_claim_and_no_process(folder: Path) -> None:
    sweep = start_sweep(folder, "slow")
    assert sweep.stdout is not None
    while not sweep.stdout.readline().startswith("step"):
        pass
    sweep.send_signal(signal.SIGINT)
    sweep.communicate(timeout=20)
    assert_no_process_is_left(folder)
    assert stored(folder) == []
    assert not (folder / "store.sqlite.claims").exists()


@pytest.mark.proof
@pytest.mark.parametrize("contained", [False, True], ids=["of one machine", "in two containers"])
def test_two_sweeps_at_once_share_the_trials_and_never_disturb_each_other(folder: Path, contained: bool) -> None:
    if contained and os.geteuid() != 0:
        pytest.skip("only root may make namespaces of processes")
    within = CONTAINED if contained else ()
    sweeps = [start_sweep(folder, "ok-slowly", LAYOUTS[:3], within=within) for _ in range(2)]
    outputs = [sweep.communicate(timeout=60)[0].splitlines() for sweep in sweeps]
    assert [lines[-1] for lines in outputs] == ["rows 3 ok ok ok"] * 2
    rows = stored(folder)
    assert len(rows) == len({row.trial_key for row in rows}) == 3
    events = sorted(
        (float(line.split()[-1]), line.split()[0]) for lines in outputs for line in lines[:-1]
        if line.startswith(("started", "finished"))
    )  # fmt: skip
    assert [happening for _, happening in events] == ["started", "finished"] * 3, "one trial at a time"


def test_two_sweeps_inside_one_slurm_job_take_turns(
    folder: Path, recipe: Recipe, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of both ran side by side on the nodes of the job, and each row held the other's time."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("shutil.which", lambda name: name)
    in_job, here = SlurmLauncher(SlurmSettings()), LocalLauncher()
    assert (in_job.job, here.job) == ("7", None)
    here.on_this_machine, here.job = False, in_job.job
    happened: list[str] = []
    with Store(folder / "store.sqlite") as other, Store(folder / "store.sqlite") as store, closing(here):
        assert other.claim("slurm-job-7")

        def note(progress: Progress) -> None:
            happened.append(progress.happening)
            if progress.happening == "waiting":
                assert progress.holder is not None and progress.holder.pid == os.getpid()
                other.release("slurm-job-7")

        (row,) = run_sweep(
            recipe, cluster, [parse_layout("dp1,mbs1")], store, data_dir=folder, work_dir=folder / "runs",
            launcher=here, limits=LIMITS, worker=fake_worker("ok"), on_progress=note,
        )  # fmt: skip
        assert other.claim("slurm-job-7"), "it is given back"
    assert row.status == "ok" and happened[:2] == ["waiting", "started"]


def test_a_sweep_that_lost_its_claim_meanwhile_stores_no_row_of_that_run(
    folder: Path, recipe: Recipe, cluster: Cluster
) -> None:
    runs: list[str] = []

    def lose(progress: Progress) -> None:
        if progress.happening == "started":
            runs.append(progress.happening)
            if len(runs) == 1:  # another host took this process for dead, and gave the claim back
                for claim in (folder / "store.sqlite.claims").glob("[0-9a-f]*"):
                    claim.unlink()

    with Store(folder / "store.sqlite") as store:
        run_sweep(
            recipe, cluster, [parse_layout("dp1,mbs1")], store, data_dir=folder, work_dir=folder / "runs",
            limits=LIMITS, worker=fake_worker("ok"), on_progress=lose,
        )  # fmt: skip
    assert len(runs) == 2 and len(stored(folder)) == 1


def sweep_here(
    folder: Path, recipe: Recipe, cluster: Cluster, layouts: list[str], behaviour: str, **options: object
) -> tuple[list[Measurement], list[Progress]]:
    told: list[Progress] = []
    with Store(folder / "store.sqlite") as store:
        rows = run_sweep(
            recipe, cluster, [parse_layout(text) for text in layouts], store,
            data_dir=folder, work_dir=folder / "runs", limits=LIMITS, worker=fake_worker(behaviour),
            on_progress=told.append, **options,  # type: ignore[arg-type]
        )  # fmt: skip
    return rows, told


def test_each_row_is_stored_before_the_next_trial_begins(folder: Path, recipe: Recipe, cluster: Cluster) -> None:
    seen: list[int] = []

    def look(progress: Progress) -> None:
        if progress.happening == "started":
            seen.append(len(stored(folder)))

    with Store(folder / "store.sqlite") as store:
        run_sweep(
            recipe, cluster, [parse_layout(text) for text in LAYOUTS[:3]], store,
            data_dir=folder, work_dir=folder / "runs", limits=LIMITS, worker=fake_worker("ok"), on_progress=look,
        )  # fmt: skip
    assert seen == [0, 1, 2]


def test_progress_says_what_is_done_and_what_remains(folder: Path, recipe: Recipe, cluster: Cluster) -> None:
    _, told = sweep_here(folder, recipe, cluster, LAYOUTS[:2], "ok")
    assert [p.done for p in told if p.happening in ("started", "finished")] == [0, 1, 1, 2]
    assert {p.total for p in told} == {2}
    assert max(p.steps_done for p in told) == told[0].steps == 6
    assert told[0].remaining_s is None
    assert told[-1].remaining_s == 0


def test_failures_are_kept_and_run_again_only_on_request(folder: Path, recipe: Recipe, cluster: Cluster) -> None:
    layouts = ["dp1,mbs1", "dp2,mbs1"]
    assert [row.status for row in sweep_here(folder, recipe, cluster, layouts, "fail")[0]] == ["fail", "fail"]
    rows, told = sweep_here(folder, recipe, cluster, layouts, "ok")
    assert [row.status for row in rows] == ["fail", "fail"]
    assert [p.happening for p in told] == ["kept", "kept"]
    rows, _ = sweep_here(folder, recipe, cluster, layouts, "ok", retry=frozenset({"fail"}))
    assert [row.status for row in rows] == ["ok", "ok"]
    assert len(stored(folder)) == 4
    rows, told = sweep_here(folder, recipe, cluster, layouts, "ok", retry=frozenset({"fail"}))
    assert [p.happening for p in told] == ["kept", "kept"]


def test_a_layout_stated_twice_is_run_once(folder: Path, recipe: Recipe, cluster: Cluster) -> None:
    rows, told = sweep_here(folder, recipe, cluster, ["dp2,mbs1", "dp1,mbs1", "dp2,tp1,mbs1"], "ok")
    assert [row.dp for row in rows] == [2, 1, 2]
    assert told[-1].total == 2


def test_what_the_plan_said_is_kept_beside_what_was_measured(folder: Path, recipe: Recipe, cluster: Cluster) -> None:
    predictions = {parse_layout("dp1,mbs1"): Prediction(sec_per_it=1.5, mem_gib=0.5)}
    rows, _ = sweep_here(folder, recipe, cluster, ["dp1,mbs1", "dp2,mbs1"], "ok", predictions=predictions)
    assert [row.predicted_sec_per_it for row in rows] == [1.5, None]
    assert rows[0].predicted_mem_gib == 0.5


def test_an_invalid_layout_is_refused_before_anything_runs(folder: Path, recipe: Recipe, cluster: Cluster) -> None:
    with pytest.raises(TrimaranError, match="micro-batch 3"):
        sweep_here(folder, recipe, cluster, ["dp1,mbs1", "dp1,mbs3"], "ok")
    assert stored(folder) == []


@pytest.mark.parametrize("shared", [False, True], ids=["of this machine", "of several hosts"])
def test_a_store_that_cannot_be_written_is_told_before_the_first_trial_and_gives_what_it_holds(
    folder: Path, shared: bool
) -> None:
    rows = folder / "store.sqlite.rows"
    if shared:
        rows.mkdir()
    out, _ = start_sweep(folder, layouts=LAYOUTS[:1]).communicate(timeout=60)
    assert out.splitlines()[-1] == "rows 1 ok"
    (rows if shared else folder / "store.sqlite").chmod(0o555 if shared else 0o444)
    try:
        out, told = start_sweep(folder, layouts=LAYOUTS[:2], within=bound_by_permissions()).communicate(timeout=60)
        assert "started" not in out, "no trial is run whose row could not be stored"
        assert "TrimaranError: store " in told.splitlines()[-1] and "check its permissions" in told.splitlines()[-1]
        out, told = start_sweep(folder, layouts=LAYOUTS[:1], within=bound_by_permissions()).communicate(timeout=60)
        assert [line.split()[0] for line in out.splitlines()] == ["kept", "rows"], told
    finally:
        (rows if shared else folder / "store.sqlite").chmod(0o755)


def test_a_store_that_fills_the_disk_ends_the_sweep_in_one_line(folder: Path, recipe: Recipe, cluster: Cluster) -> None:
    with mounted(folder / "disk", "512k") as disk, Store(disk / "store.sqlite") as store:
        sweep = [parse_layout("dp1,mbs1"), parse_layout("dp1,mbs2")]
        options = {"data_dir": folder, "work_dir": folder / "runs", "limits": LIMITS}
        done = run_sweep(recipe, cluster, sweep[:1], store, worker=fake_worker("ok"), **options)
        with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="space"):
            while True:
                filler.write(b"x" * 4096)
        with pytest.raises(TrimaranError, match="free space and run again") as error:
            for _ in range(100):  # the log that the store wrote before has a little room left
                store.add(done[0].model_copy(update={"trial_key": None, "evidence": "x" * 4000}))
        assert "\n" not in str(error.value)
        (disk / "filler").unlink()
        rows = run_sweep(recipe, cluster, sweep, store, worker=fake_worker("ok"), **options)
        assert [row.status for row in rows] == ["ok", "ok"]


def test_a_finished_trial_whose_row_found_no_room_is_stored_later_and_not_run_again(
    folder: Path, recipe: Recipe, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(self: Store, row: Measurement) -> None:
        raise TrimaranError("the disk is full")

    with Store(folder / "store.sqlite") as store:
        options = {"data_dir": folder, "work_dir": folder / "runs", "limits": LIMITS}
        with monkeypatch.context() as full:
            full.setattr(Store, "add", no_room)
            with pytest.raises(TrimaranError, match="full"):
                run_sweep(recipe, cluster, [parse_layout("dp1,mbs1")], store, worker=fake_worker("ok"), **options)
        (row,) = run_sweep(recipe, cluster, [parse_layout("dp1,mbs1")], store, worker=fake_worker("fail"), **options)
        assert (row.status, row.sec_per_it, row.wall_s) == ("ok", pytest.approx(1.15), None)
        # what was stored is not taken for a run again
        (row,) = run_sweep(
            recipe, cluster, [parse_layout("dp1,mbs1")], store, worker=fake_worker("fail"),
            retry=frozenset({"ok"}), **options,
        )  # fmt: skip
        assert row.status == "fail"


def test_a_sweep_that_is_stopped_right_behind_a_row_does_not_store_it_twice(
    folder: Path, recipe: Recipe, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(trial: Trial) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr("trimaran.bench.sweep.stored", ctrl_c)
        sweep_here(folder, recipe, cluster, ["dp1,mbs1"], "ok")
    assert [row.status for row in stored(folder)] == ["ok"]
    (row,), _ = sweep_here(folder, recipe, cluster, ["dp1,mbs1"], "fail", retry=frozenset({"ok"}))
    assert row.status == "fail", "it is run again, as asked"


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "of an earlier version"])
def test_a_row_that_is_stored_later_says_when_and_under_what_its_trial_ran(
    folder: Path, recipe: Recipe, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, noted: bool
) -> None:
    def no_room(self: Store, row: Measurement) -> None:
        raise TrimaranError("the disk is full")

    began = datetime.now(UTC).isoformat(timespec="seconds")
    with monkeypatch.context() as full, pytest.raises(TrimaranError, match="full"):
        full.setattr(Store, "add", no_room)
        full.setenv("OMP_PROC_BIND", "false")
        sweep_here(folder, recipe, cluster, ["dp1,mbs1"], "ok")
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    if not noted:
        for note in (folder / "runs").rglob("circumstances.json"):
            note.unlink()
    time.sleep(1.1)
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    (row,), _ = sweep_here(folder, recipe, cluster, ["dp1,mbs1"], "fail")
    assert row.status == "ok"
    assert (row.environment["OMP_PROC_BIND"] == "false") is noted
    assert (began <= (row.created_at or "") <= ended) is noted


def test_a_sweep_may_run_beside_other_threads(folder: Path, recipe: Recipe, cluster: Cluster) -> None:
    rows: list[Measurement] = []
    thread = threading.Thread(
        target=lambda: rows.extend(sweep_here(folder, recipe, cluster, LAYOUTS[:2], "ok")[0])
    )  # fmt: skip
    thread.start()
    thread.join(30)
    assert [row.status for row in rows] == ["ok", "ok"]


def test_a_sweep_that_waits_asks_once_for_all_its_trials(folder: Path, recipe: Recipe, cluster: Cluster) -> None:
    """It asked for each, twice a second, and so took time of the cores that the other one measured."""
    asked: list[str] = []

    class Counting(Store):
        def claim(self, key: str, *, attempts_seen: int = 0) -> bool:
            asked.append(key)
            return super().claim(key, attempts_seen=attempts_seen)

    waits: list[int] = []

    def look(progress: Progress) -> None:
        if progress.happening == "waiting":
            waits.append(len(asked))
            if len(waits) == 3:
                other.release(f"machine-{this_boot()}")

    with Store(folder / "store.sqlite") as other, Counting(folder / "store.sqlite") as store:
        assert other.claim(f"machine-{this_boot()}")
        rows = run_sweep(
            recipe, cluster, [parse_layout(text) for text in LAYOUTS[:4]], store,
            data_dir=folder, work_dir=folder / "runs", limits=LIMITS, worker=fake_worker("ok"), on_progress=look,
        )  # fmt: skip
    assert [row.status for row in rows] == ["ok"] * 4
    assert waits == [1, 2, 3]
