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
from processes import processes_in, rank_of

STEPS = 60
STOPPED = 75


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tiny_recipe(tmp_path)
    text = path.read_text().replace("steps = 12\n", f"steps = {STEPS}\ncheckpoint_every = 10\nrestarts = 20\n")
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


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
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


@pytest.mark.proof
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
    assert "not finite from step 8 on, 10 steps in a row" in told and "the checkpoint of step 6 is kept" in told
    kept = sorted(folder.name for folder in (tmp_path / "runs/tiny/checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000006"]


def faults(runs: Path) -> int:
    """Faults that the training has noticed so far."""
    events = runs / "tiny/events.csv"
    rows = events.read_text().splitlines() if events.exists() else []
    return sum(",crash," in row or ",fail," in row for row in rows)


def kill_once(running: subprocess.Popen[str], runs: Path, chance: random.Random, kind: str) -> None:
    """Kill -9 one rank or all, at a random step, in start-up, or while a checkpoint is being written.

    Each kind kills another rank than the one before: one that failed twice in a row would be left out.
    """
    log, checkpoints = runs / "tiny/train/log.jsonl", runs / "tiny/checkpoints"
    wait_for(lambda: len(processes_in(runs)) >= 2, running)
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

    def victims() -> list[Path]:
        """Ranks to kill; in start-up they may not be there yet."""
        ranks = processes_in(runs)
        return ranks if kind == "all" else [process for process in ranks if rank_of(process) == KINDS.index(kind) % 2]

    wait_for(lambda: bool(victims()), running)
    before = faults(runs)
    for process in victims():
        os.kill(int(process.name), signal.SIGKILL)
    wait_for(lambda: faults(runs) > before, running)


KINDS = ("in a save", "one", "all", "in start-up")


def losses_with_kills(recipe: Path, folder: Path, layout: str, kills: int) -> list[float]:
    """Losses of a training whose ranks are killed `kills` times, and which goes on by itself each time."""
    chance = random.Random(kills)
    command = [TRIMARAN, "train", str(recipe), "--layout", layout, "--resume"]
    running = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    for killed in range(kills):
        kill_once(running, folder / "runs", chance, KINDS[killed % len(KINDS)])
    told = running.communicate(timeout=900)[1]
    assert running.returncode == 0, told
    assert faults(folder / "runs") >= kills, "the training was over before"
    return losses(folder / "runs/tiny/train")


@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        pytest.param("dp2,mbs2", 10, marks=pytest.mark.proof),
        pytest.param("pp2,mbs1", len(KINDS), marks=pytest.mark.proof),
    ],
)
@pytest.mark.timeout(1800)
def test_a_training_killed_again_and_again_ends_as_if_undisturbed(
    recipe: Path, tmp_path: Path, layout: str, kills: int
) -> None:
    recipe.write_text(recipe.read_text().replace(f"steps = {STEPS}", f"steps = {40 + 100 * kills}"))
    disturbed = losses_with_kills(recipe, tmp_path, layout, kills)
    command = ("train", str(recipe), "--layout", layout, "--runs", "whole")
    assert run(*command, cwd=tmp_path, timeout_s=900).returncode == 0
    assert disturbed == losses(tmp_path / "whole/tiny/train")
