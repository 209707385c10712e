"""Claims about what goes wrong on Slurm: a queue, a job, a node, a watcher or the sweep itself is told apart."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from on_slurm import LIMITS, SUBMITS, squeue
from virtual_cluster import killed_node

from command import tiny_recipe
from trial_helpers import fake_worker, processes_that_name, start_silent_ranks_and_kill_the_launcher
from trimaran.bench.launch.slurm import slurm_ranks
from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher
from trimaran.bench.sweep import run_sweep
from trimaran.bench.trial.trial import Trial, prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store


@pytest.fixture
def trial(recipe: Recipe, two_nodes: Cluster, tmp_path: Path) -> Trial:
    """Two ranks on each of two nodes."""
    return prepare_trial(recipe, two_nodes, parse_layout("dp4"), data_dir=tmp_path, work_dir=tmp_path / "runs")


def test_sigterm_ends_a_training_that_waits_in_the_queue(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("[train]", "[sweep.slurm]\n[train]"))
    blocker = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "exec sleep 300"]
    number = subprocess.run(blocker, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.strip()
    waiting = subprocess.Popen(
        [str(Path(sys.executable).with_name("trimaran")), "train", str(recipe), "--layout", "dp1,mbs4"],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert waiting.stderr is not None
        while "waits (" not in (line := waiting.stderr.readline()):
            assert line, "it ended before it waited"
        waiting.send_signal(signal.SIGTERM)
        told = waiting.communicate(timeout=30)[1]
        assert waiting.returncode == 75, told
        assert "stopped before its ranks were started" in told
        events = (tmp_path / "runs/tiny/events.csv").read_text().splitlines()
        assert [row.split(",")[1] for row in events] == ["event", "began", "stopped"]
        assert [line.split()[0] for line in squeue() if "COMPLETING" not in line] == [number]
    finally:
        waiting.kill()
        subprocess.run(["scancel", number], check=True)


@pytest.mark.proof
@SUBMITS
def test_a_job_that_is_taken_away_is_run_again_where_asked(trial: Trial, tmp_path: Path, submit: str) -> None:
    starts = tmp_path / "starts"
    starts.touch()

    def cancel_the_first(step: int) -> None:
        if starts.stat().st_size == 0:
            starts.write_text("one")
            (number,) = {line.split()[0] for line in squeue() if "RUNNING" in line}
            subprocess.run(["scancel", number], check=True)

    for requeue, status in ((False, "lost"), (True, "ok")):
        starts.write_text("")
        with closing(SlurmLauncher(SlurmSettings(submit=submit, requeue=requeue))) as launcher:
            row = run_trial(trial, launcher, LIMITS, worker=fake_worker("ok-slowly"), on_step=cancel_the_first)
        assert row.status == status, row.evidence
        if status == "lost":
            assert "was cancelled: look who did" in (row.evidence or "")


@pytest.mark.proof
@SUBMITS
def test_a_job_that_is_suspended_is_told_so_and_takes_no_node_for_dead(trial: Trial, submit: str) -> None:
    suspended: list[str] = []

    def suspend(step: int) -> None:
        if not suspended:
            suspended.extend({line.split()[0] for line in squeue() if "RUNNING" in line})
            subprocess.run(["scontrol", "suspend", *suspended], check=True)

    with closing(SlurmLauncher(SlurmSettings(submit=submit, partition="main"))) as launcher:
        began = time.monotonic()
        row = run_trial(trial, launcher, LIMITS, worker=fake_worker("ok-slowly"), on_step=suspend)
        assert row.status == "lost", row.evidence
        assert f"Slurm suspended job {suspended[0]}" in (row.evidence or "").splitlines()[0]
        assert time.monotonic() - began < 40
        assert launcher.nodes_left() == 2


def processes_of_node(name: str, folder: Path) -> list[int]:
    """The ranks of a trial under `folder` that run on a node, and their parents."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            on_node = f"SLURMD_NODENAME={name}\0".encode() in file.read_bytes()
            if on_node and str(folder).encode() in (file.parent / "cmdline").read_bytes():
                found.append(int(file.parent.name))
    return found


@pytest.mark.proof
@SUBMITS
def test_a_node_that_freezes_is_told_from_a_hang_and_its_trial_run_again(
    trial: Trial, tmp_path: Path, submit: str
) -> None:
    frozen: list[int] = []

    def freeze(step: int) -> None:
        # two ranks and what watches each of them, which start when they do: no rank waits for the others here
        found = processes_of_node("n2", tmp_path)
        if not frozen and len(found) >= 4:
            frozen.extend(found)
            for process in frozen:
                os.kill(process, signal.SIGSTOP)

    for restarts, status in ((0, "lost"), (1, "ok")):
        frozen.clear()
        with closing(SlurmLauncher(SlurmSettings(submit=submit))) as launcher:
            launcher.restarts = restarts
            row = run_trial(trial, launcher, LIMITS, worker=fake_worker("ok-slowly"), on_step=freeze)
        assert len(frozen) >= 4
        assert row.status == status, row.evidence
        if status == "lost":
            assert (row.evidence or "").startswith("node n2 of rank 2, 3 does not answer (Slurm job ")


@pytest.mark.proof
def test_a_node_that_dies_is_named_and_left_out_of_the_next_allocation(
    trial: Trial, slurm_conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks leave no status, and those of the other node fail for want of them long before Slurm knows."""
    monkeypatch.setattr(slurm_ranks, "_SEEN_WITHIN_S", 4.0)
    limits = Limits(timeout_s=60, start_s=30, hang_s=20, peers_s=1)
    with contextlib.ExitStack() as stack:
        launcher = stack.enter_context(closing(SlurmLauncher(SlurmSettings(partition="wide"))))
        dead: list[str] = []

        def power_off(step: int) -> None:
            if not dead:
                dead.append("n2")
                stack.enter_context(killed_node(slurm_conf, "n2"))

        launcher.restarts = 0
        row = run_trial(trial, launcher, limits, worker=fake_worker("meet"), on_step=power_off)
        assert row.status == "lost", row.evidence
        evidence = row.evidence or ""
        assert evidence.startswith("node n2 of rank 2, 3 does not answer (Slurm job ")
        assert "rank 3: was on node n2, and nothing answers for it" in evidence
        row = run_trial(trial, launcher, limits, worker=fake_worker("meet"))
        assert row.status == "ok", row.evidence
        nodes = {(Path(trial.job.out_dir) / f"node.{rank}").read_text() for rank in range(4)}
        assert nodes == {"n1", "n3"}


@pytest.mark.proof
def test_a_stopped_rank_on_another_node_is_named(trial: Trial, tmp_path: Path) -> None:

    def stop_rank_3(step: int) -> None:
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                at_rank_3 = b"\0RANK=3\0" in file.read_bytes()
                if at_rank_3 and str(tmp_path).encode() in (file.parent / "cmdline").read_bytes():
                    os.kill(int(file.parent.name), signal.SIGSTOP)

    with closing(SlurmLauncher(SlurmSettings())) as launcher:
        limits = Limits(timeout_s=60, start_s=30, hang_s=3, peers_s=1)
        row = run_trial(trial, launcher, limits, worker=fake_worker("ok-slowly"), on_step=stop_rank_3)
    assert row.status == "hang", row.evidence
    assert (row.evidence or "").startswith("rank 3 is stopped; rank 3 gave no sign for")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("victim", "says"),
    [
        ("node.py rank", "what watches rank 3 on node n2 was ended"),
        ("srun", "srun, which stands for the ranks, was ended by signal 9"),
    ],
)
def test_what_serves_the_ranks_is_no_part_of_the_layout(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, says: str
) -> None:
    monkeypatch.setattr(slurm_ranks, "_SEEN_WITHIN_S", 4.0)
    killed: list[int] = []

    def kill(step: int) -> None:
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                command = (file.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                at_rank_3 = victim == "srun" or b"SLURM_PROCID=3\0" in file.read_bytes()
                if not killed and at_rank_3 and victim in command and str(tmp_path) in command:
                    killed.append(int(file.parent.name))
                    os.kill(killed[0], signal.SIGKILL)

    with closing(SlurmLauncher(SlurmSettings())) as launcher:
        launcher.restarts = 0
        row = run_trial(trial, launcher, LIMITS, worker=fake_worker("meet"), on_step=kill)
        assert row.status == "lost" and says in (row.evidence or ""), row.evidence
        launcher.restarts = 1
        killed.clear()
        assert run_trial(trial, launcher, LIMITS, worker=fake_worker("meet"), on_step=kill).status == "ok"


@pytest.mark.proof
@SUBMITS
def test_what_a_killed_sweep_left_on_the_nodes_ends_by_itself(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, submit: str
) -> None:
    slurm = (
        "from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher\n"
        "from trimaran.nouns.slurm_settings import SlurmSettings\n"
        f"launcher = SlurmLauncher(SlurmSettings(submit={submit!r}))"
    )
    trial = tmp_path / "trial"
    trial.mkdir()
    start_silent_ranks_and_kill_the_launcher(
        trial, slurm, ", ranks_per_node=2", ranks=4, environment={"TRIMARAN_LOST_AFTER_S": "3"}
    )
    deadline = time.monotonic() + 30
    while (squeue() or processes_that_name(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.2)  # the fixture asserts that nothing is left


@pytest.mark.proof
def test_an_interrupted_sweep_gives_everything_back(recipe: Recipe, two_nodes: Cluster, tmp_path: Path) -> None:
    timer = threading.Timer(6.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with Store(tmp_path / "store.sqlite") as store:
        with closing(SlurmLauncher(SlurmSettings(at_once=2))) as launcher, pytest.raises(KeyboardInterrupt):
            run_sweep(
                recipe, two_nodes, [parse_layout("dp1,mbs1"), parse_layout("dp2,mbs1")], store, data_dir=tmp_path,
                work_dir=tmp_path / "runs", launcher=launcher, limits=Limits(start_s=100), worker=fake_worker("silent"),
            )  # fmt: skip
        assert store.measurements() == []
    timer.join()
