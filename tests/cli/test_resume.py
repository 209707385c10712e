"""Trainings that are stopped or killed go on from their checkpoints, and end as if nothing had happened."""

from __future__ import annotations

import csv
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
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_stopped_training_saves_leaves_with_75_and_goes_on_on_another_layout(
    recipe: Path, tmp_path: Path, number: signal.Signals
) -> None:
    train = ["train", str(recipe), "--layout"]
    command = ["env", "--default-signal=HUP", TRIMARAN, *train, "dp2,mbs2"]  # these tests may run under nohup
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
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


@pytest.mark.proof
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_saves_as_sigterm_does(recipe: Path, tmp_path: Path, times: int) -> None:
    """Twice in a moment, too, as where what runs the command passes it on besides: that lost what was not saved."""
    running = subprocess.Popen(
        [TRIMARAN, "train", str(recipe), "--layout", "dp2,mbs2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    log = tmp_path / "runs/tiny/train/log.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count("\n") >= 3, running)
    for _ in range(times):
        running.send_signal(signal.SIGINT)
        time.sleep(0.05)
    told = running.communicate(timeout=60)[1].strip().splitlines()
    assert running.returncode == STOPPED, told
    stopped_at = len(losses(log.parent))
    assert told[-1] == f"trimaran: stopped at step {stopped_at} and saved; the same command with --resume goes on"
    assert (tmp_path / f"runs/tiny/checkpoints/step-{stopped_at:08d}/manifest.json").exists()


@pytest.mark.proof
def test_a_training_under_nohup_outlives_its_terminal(recipe: Path, tmp_path: Path) -> None:
    command = ["nohup", TRIMARAN, "train", str(recipe), "--layout", "dp2,mbs2"]
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "runs/tiny/train/log.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count("\n") >= 3, running)
    running.send_signal(signal.SIGHUP)
    told = running.communicate(timeout=120)[1]
    assert running.returncode == 0, told
    assert len(losses(log.parent)) == STEPS


@pytest.mark.proof
def test_a_training_whose_words_nobody_reads_any_more_saves_as_it_is_stopped(recipe: Path, tmp_path: Path) -> None:
    """As under `2>&1 | tee log`, which the same Ctrl-C ends: that left with status 1, where 75 has it run again."""
    recipe.write_text(recipe.read_text().replace(f"steps = {STEPS}", "steps = 100000"))
    reads, writes = os.pipe()
    command = [TRIMARAN, "train", str(recipe), "--layout", "dp2,mbs2"]
    running = subprocess.Popen(command, cwd=tmp_path, stderr=writes, text=True)
    os.close(writes)
    log = tmp_path / "runs/tiny/train/log.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count("\n") >= 3, running)
    os.close(reads)
    wait_for(lambda: log.read_text().count("\n") >= 12, running)  # of step 10 it has said something
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=60) == STOPPED
    assert (tmp_path / f"runs/tiny/checkpoints/step-{len(losses(log.parent)):08d}/manifest.json").exists()


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


def failed_ranks(runs: Path) -> list[str]:
    """The rank that is blamed for each fault that the training has noticed so far."""
    events = runs / "tiny/events.csv"
    if not events.exists():
        return []
    with events.open(newline="") as file:
        return [row["rank"] for row in csv.DictReader(file) if row["event"] in ("crash", "fail")]


def wait_for_steps(running: subprocess.Popen[str], runs: Path, steps: int) -> int:
    """Wait until ranks have made so many steps since their start; how many all starts have made."""
    log, checkpoints = runs / "tiny/train/log.jsonl", runs / "tiny/checkpoints"
    # the new log begins with the earlier lines up to the checkpoint that is gone on from
    saved = [entry.name for entry in checkpoints.glob("step-*")]
    until, fresh = max((int(name.removeprefix("step-")) for name in saved), default=0) + steps, time.time()
    wait_for(lambda: log.exists() and log.stat().st_mtime > fresh and log.read_text().count("\n") >= until, running)
    return until


def kill_once(running: subprocess.Popen[str], runs: Path, chance: random.Random, kind: str) -> None:
    """Kill -9 one rank or all, at a random step, in start-up, or while a checkpoint is being written.

    One rank is another than the one that failed before: one that failed twice in a row would be left out.
    """
    failed = failed_ranks(runs)
    wait_for(lambda: len(processes_in(runs)) >= 2, running)
    if kind == "in start-up":
        time.sleep(chance.uniform(0, 2))
    else:
        wait_for_steps(running, runs, chance.randint(1, 40))
    if kind == "in a save":
        wait_for(lambda: any((runs / "tiny/checkpoints").glob("saving-*")), running)

    def victims() -> list[Path]:
        """Ranks to kill; in start-up they may not be there yet."""
        ranks = {process: rank_of(process) for process in processes_in(runs)}
        spared = {None, *map(int, failed[-1:])}  # None: of one that begins nobody knows yet which it is
        return [process for process, rank in ranks.items() if kind == "all" or rank not in spared]

    wait_for(lambda: bool(victims()), running)
    for process in victims()[: None if kind == "all" else 1]:
        os.kill(int(process.name), signal.SIGKILL)
    wait_for(lambda: len(failed_ranks(runs)) > len(failed), running)


def losses_of(
    recipe: Path, folder: Path, layout: str, runs: Path, until: Callable[[subprocess.Popen[str]], int]
) -> list[float]:
    """Losses of a training that is asked to save and to leave once `until` returns, up to the step that it returns."""
    command = [TRIMARAN, "train", str(recipe), "--layout", layout, "--runs", str(runs), "--resume"]
    running = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        step = until(running)
        running.send_signal(signal.SIGTERM)
        told = running.communicate(timeout=300)[1]
    finally:
        running.kill()
    assert running.returncode == STOPPED, told
    return losses(runs / "tiny/train")[:step]


@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        # "all" comes first: either rank may be blamed, and one that is blamed twice in a row is left out for an hour
        pytest.param("dp2,mbs2", ("all", "in a save", "one", "in start-up", "in a save", "one"), id="dp2"),
        pytest.param("pp2,mbs1", ("all", "in a save", "one", "in start-up"), id="pp2"),
    ],
)
@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_training_killed_again_and_again_goes_on_as_if_undisturbed(
    recipe: Path, tmp_path: Path, layout: str, kills: tuple[str, ...]
) -> None:
    """How many steps there are between kills is the machine's affair: the training goes on until all have struck."""
    recipe.write_text(recipe.read_text().replace(f"steps = {STEPS}", "steps = 100000"))
    runs, whole = tmp_path / "runs", tmp_path / "whole"

    def strike(running: subprocess.Popen[str]) -> int:
        chance = random.Random(len(kills))
        for kind in kills:
            kill_once(running, runs, chance, kind)
        return wait_for_steps(running, runs, 20)

    disturbed = losses_of(recipe, tmp_path, layout, runs, strike)
    assert len(failed_ranks(runs)) >= len(kills)
    assert len(disturbed) >= 20
    undisturbed = losses_of(recipe, tmp_path, layout, whole, lambda run: wait_for_steps(run, whole, len(disturbed)))
    assert disturbed == undisturbed
