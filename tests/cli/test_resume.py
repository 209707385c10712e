"""Trainings that are stopped or killed go on from their checkpoints, and end as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command import TRIMARAN, run, tiny_recipe
from processes import processes_in

STEPS = 60
STOPPED = 75


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tiny_recipe(tmp_path)
    text = path.read_text().replace("steps = 12\n", f"steps = {STEPS}\ncheckpoint_every = 10\nkeep_checkpoints = 2\n")
    text = text.replace("1e-2", "1e-3")  # at a high rate the rounding of two layouts soon leads to two courses
    path.write_text(text.replace("hidden = 32", "hidden = 128"))
    return path


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["lm_loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not happened() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.proof)])
def test_a_stopped_training_saves_leaves_with_75_and_goes_on_on_another_layout(
    recipe: Path, tmp_path: Path, number: signal.Signals
) -> None:
    train = ["train", str(recipe), "--layout"]
    running = subprocess.Popen([TRIMARAN, *train, "dp2,mbs2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "runs/tiny/train/log.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count("\n") >= 5, running)
    running.send_signal(number)
    told = running.communicate(timeout=60)[1].strip().splitlines()
    assert running.returncode == STOPPED
    stopped_at = len(losses(log.parent))
    assert told[-1] == f"trimaran: stopped at step {stopped_at} and saved; the same command with --resume goes on"

    done = run(*train, "tp2,mbs4", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"going on from step {stopped_at} of " in done.stderr
    resumed = losses(log.parent)
    assert len(resumed) == STEPS
    undisturbed = run(*train, "dp1,mbs4", "--runs", "whole", cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    alike = stopped_at + 10
    assert resumed[:alike] == pytest.approx(losses(tmp_path / "whole/tiny/train")[:alike], rel=1e-5)


def test_ctrl_c_saves_as_sigterm_does(recipe: Path, tmp_path: Path) -> None:
    running = subprocess.Popen(
        [TRIMARAN, "train", str(recipe), "--layout", "dp2,mbs2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    log = tmp_path / "runs/tiny/train/log.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count("\n") >= 3, running)
    running.send_signal(signal.SIGINT)
    told = running.communicate(timeout=60)[1].strip().splitlines()
    assert running.returncode == STOPPED, told
    stopped_at = len(losses(log.parent))
    assert told[-1] == f"trimaran: stopped at step {stopped_at} and saved; the same command with --resume goes on"
    assert (tmp_path / f"runs/tiny/checkpoints/step-{stopped_at:08d}/manifest.json").exists()


def test_a_loss_that_is_no_number_ends_a_training_and_keeps_the_good_checkpoints(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    good = recipe.read_text().replace("steps = 12\n", "steps = 6\ncheckpoint_every = 2\nkeep_checkpoints = 2\n")
    recipe.write_text(good)
    train = ["train", str(recipe), "--layout", "dp2,mbs2", "--resume"]
    assert run(*train, cwd=tmp_path).returncode == 0
    recipe.write_text(good.replace("steps = 6", "steps = 60").replace("1e-2", "9e18\nweight_decay = 9e18"))
    diverged = run(*train, cwd=tmp_path)
    assert diverged.returncode == 2, diverged.stderr
    told = diverged.stderr.strip().splitlines()[-1]
    assert "not finite from step 8 on, 10 steps in a row; the checkpoint of step 6 is kept" in told
    kept = sorted(folder.name for folder in (tmp_path / "runs/tiny/checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000006"]


def test_a_new_training_keeps_the_checkpoints_of_the_one_before(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    train = ["train", str(recipe), "--layout", "dp1,mbs4"]
    assert run(*train, cwd=tmp_path).returncode == 0
    again = run(*train, cwd=tmp_path)
    assert "checkpoints of an earlier training are kept in runs/tiny/checkpoints-1" in again.stderr
    assert (tmp_path / "runs/tiny/checkpoints-1/step-00000012/manifest.json").exists()

    recipe.write_text(recipe.read_text().replace("steps = 12", "steps = 20\ncheckpoint_every = 0"))
    unsaved = run(*train, "--resume", cwd=tmp_path)
    assert unsaved.returncode == 0 and "going on from step 12 of" in unsaved.stderr, unsaved.stderr
    assert [entry.name for entry in (tmp_path / "runs/tiny/checkpoints").iterdir()] == ["step-00000012"]

    recipe.write_text(recipe.read_text().replace("hidden = 32", "hidden = 64"))
    refused = run(*train, "--resume", cwd=tmp_path)
    assert refused.returncode == 2
    assert "workload.model.hidden is 64, the checkpoint has 32" in refused.stderr


def test_a_finished_training_stays_as_it_is_and_more_steps_tell_of_the_rate_they_raise(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    train = ["train", str(recipe), "--layout", "dp1,mbs4", "--resume"]
    result = tmp_path / "runs/tiny/train/result.json"
    assert run(*train, cwd=tmp_path).returncode == 0
    first = result.read_bytes()

    again = run(*train, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "all 12 steps were made before" in again.stderr and again.stdout.startswith("12 steps with dp1")
    assert result.read_bytes() == first and not (tmp_path / "runs/tiny/train-1").exists()

    result.unlink()  # as by a kill between the last checkpoint and the result
    ended = run(*train, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for figure in ("sec_per_it", "losses", "grad_norms"):
        assert json.loads(result.read_text())[figure] == json.loads(first)[figure]

    recipe.write_text(recipe.read_text().replace("steps = 12", "steps = 24"))
    more = run(*train, cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    log = [json.loads(line) for line in (result.parent / "log.jsonl").read_text().splitlines()]
    rate = log[12]["learning_rate"]
    told = next(line for line in more.stderr.splitlines() if "learning rate" in line)
    assert f"the next step's learning rate is {rate:.4g} instead of 0.0001" in told
    assert "train.decay_steps = 12 keeps it" in told


def kill_once(running: subprocess.Popen[str], runs: Path, chance: random.Random, kind: str) -> None:
    """Kill -9 one rank or all, at a random step, in start-up, or while a checkpoint is being written."""
    log, checkpoints = runs / "tiny/train/log.jsonl", runs / "tiny/checkpoints"
    wait_for(lambda: len(processes_in(runs)) == 2, running)
    if kind == "in start-up":
        time.sleep(chance.uniform(0, 2))
    else:
        # the new log begins with the earlier lines up to the checkpoint that is gone on from
        steps = [entry.name for entry in checkpoints.glob("step-*")]
        begins = max((int(name.removeprefix("step-")) for name in steps), default=0)
        until, fresh = begins + chance.randint(1, 40), time.time()
        wait_for(lambda: log.exists() and log.stat().st_mtime > fresh and log.read_text().count("\n") >= until, running)
    if kind == "in a save":
        wait_for(lambda: any(checkpoints.glob("saving-*")), running)
    ranks = [int(process.name) for process in processes_in(runs)]
    for rank in ranks if kind == "all" else [chance.choice(ranks)] if ranks else []:
        os.kill(rank, signal.SIGKILL)


KINDS = ("in a save", "one", "all", "in start-up")


def losses_with_kills(recipe: Path, folder: Path, layout: str, kills: int) -> list[float]:
    """Losses of a training whose ranks are killed `kills` times, and which is resumed each time."""
    chance = random.Random(kills)
    command = [TRIMARAN, "train", str(recipe), "--layout", layout, "--resume"]
    killed = 0
    while True:
        running = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        if killed < kills:
            kill_once(running, folder / "runs", chance, KINDS[killed % len(KINDS)])
        told = running.communicate(timeout=600)[1]
        if running.returncode == 0:
            assert killed == kills, f"the training was over after {killed} kills"
            return losses(folder / "runs/tiny/train")
        assert running.returncode == 2 and "was killed by SIGKILL" in told, told
        killed += 1


@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        ("dp2,mbs2", 1),
        pytest.param("dp2,mbs2", 20, marks=pytest.mark.proof),
        pytest.param("pp2,mbs1", 20, marks=pytest.mark.proof),
    ],
)
@pytest.mark.timeout(1800)
def test_a_training_killed_again_and_again_ends_as_if_undisturbed(
    recipe: Path, tmp_path: Path, layout: str, kills: int
) -> None:
    recipe.write_text(recipe.read_text().replace(f"steps = {STEPS}", f"steps = {40 + 60 * kills}"))
    disturbed = losses_with_kills(recipe, tmp_path, layout, kills)
    command = ("train", str(recipe), "--layout", layout, "--runs", "whole")
    assert run(*command, cwd=tmp_path, timeout_s=900).returncode == 0
    assert disturbed == losses(tmp_path / "whole/tiny/train")
