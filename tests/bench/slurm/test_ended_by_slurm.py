"""What Slurm ends or never begins is told by its cause, and goes on where that is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from on_slurm import LIMITS, SUBMITS, squeue

from command import tiny_recipe
from trial_helpers import fake_worker
from trimaran.bench.launch.slurm import slurm_ranks
from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher
from trimaran.bench.trial.trial import prepare_trial, run_trial
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.protocol.files import RunFile
from trimaran.recipe.recipe import Recipe

STEPS = 150


def jobs(state: str) -> list[str]:
    return [number for number, said in (line.split() for line in squeue()) if said == state]


def wait_until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextmanager
def all_nodes_busy(folder: Path) -> Iterator[None]:
    blocker = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "exec sleep 300"]
    number = subprocess.run(blocker, capture_output=True, text=True, check=True, cwd=folder).stdout.strip()
    try:
        wait_until(lambda: number in jobs("RUNNING"))
        yield
    finally:
        subprocess.run(["scancel", number], check=True)


def started(recipe: Path, verb: str, slurm: str, *options: str) -> subprocess.Popen[str]:
    recipe.write_text(recipe.read_text().replace("[train]", f"[sweep.slurm]\n{slurm}\n[train]"))
    command = [sys.executable, "-P", "-m", "trimaran", verb, str(recipe), *options]
    return subprocess.Popen(command, cwd=recipe.parent, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@pytest.mark.proof
@SUBMITS
def test_a_job_that_is_cancelled_while_it_waits_is_told_so(tmp_path: Path, submit: str) -> None:
    with all_nodes_busy(tmp_path):
        sweep = started(tiny_recipe(tmp_path), "bench", f'submit = "{submit}"')
        wait_until(lambda: jobs("PENDING"))
        subprocess.run(["scancel", *jobs("PENDING")], check=True)
        told = sweep.communicate(timeout=60)[1]
    assert re.search(r"Slurm job \d+ was cancelled while it waited for nodes: look who did", told), told


@pytest.mark.proof
def test_what_srun_says_where_it_starts_no_rank_is_the_reason_given(
    recipe: Recipe, two_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a shell that has outlived its job; somebody was said to have ended what watches the ranks."""
    monkeypatch.setenv("SLURM_JOB_ID", "99999")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setattr(slurm_ranks, "_SEEN_WITHIN_S", 1.0)
    trial = prepare_trial(recipe, two_nodes, parse_layout("dp4"), data_dir=tmp_path, work_dir=tmp_path / "runs")
    with closing(SlurmLauncher(SlurmSettings())) as launcher:
        launcher.restarts = 0
        row = run_trial(trial, launcher, LIMITS, worker=fake_worker("ok"))
    assert row.status == "lost"
    assert (row.evidence or "").splitlines()[0] == (
        "srun started no rank in Slurm job 99999: Unable to confirm allocation for job 99999: Invalid job id specified"
    )


@pytest.mark.proof
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("requeue", "status"), [("true", 0), ("false", 75)])
def test_a_training_whose_job_slurm_ends_goes_on_where_requeue_asks_for_it(
    tmp_path: Path, requeue: str, status: int
) -> None:
    """Its ranks save and leave as Slurm tells them to, which the command took for a wish of its user's."""
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("steps = 12", f"steps = {STEPS}\ncheckpoint_every = 10"))
    train = tmp_path / "runs/tiny/train"
    notices = RunFile.NOTICES.of(train)
    training = started(recipe, "train", f"requeue = {requeue}", "--layout", "dp1,mbs4")
    wait_until(lambda: notices.exists() and '"saved"' in notices.read_text())
    subprocess.run(["scancel", *jobs("RUNNING")], check=True)
    told = training.communicate(timeout=200)[1]
    assert training.returncode == status, told
    if status:
        end = r"Slurm job \d+ was cancelled: look who did; stopped at step \d+ and saved; the same command with "
        assert re.search(end, told), told
    else:
        assert len(RunFile.LOG.of(train).read_text().splitlines()) == STEPS
