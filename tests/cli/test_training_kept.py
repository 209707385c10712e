"""Trainings keep the logs of those before them, tell of a loss that diverged, and end cleanly when told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command import TRIMARAN, run, tiny_recipe
from processes import processes_in, rank_of
from trimaran.files.recipe_file import load_recipe
from trimaran.files.row_nouns import run_cells
from trimaran.layout.notation import parse_layout
from trimaran.nouns.measurement import Measurement
from trimaran.store import Store
from trimaran.study.train_recipe import fastest_layout
from trimaran.study.training.events import Event, EventKind, EventLog, now, set_events_aside
from trimaran.study.workspace import Workspace


@pytest.mark.proof
def test_an_earlier_training_is_kept_and_a_diverged_one_is_told(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    train = ["train", str(recipe), "--layout", "dp1,mbs4"]
    assert run(*train, cwd=tmp_path).returncode == 0
    first = (tmp_path / "runs/tiny/train/log.jsonl").read_text()

    recipe.write_text(recipe.read_text().replace("1e-2", "1e12"))
    done = run(*train, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "loss not finite" in done.stderr and "lower train.learning_rate" in done.stderr
    assert (tmp_path / "runs/tiny/train-1/log.jsonl").read_text() == first
    assert (tmp_path / "runs/tiny/events-1.csv").read_text().strip().splitlines()[-1].split(",")[1] == "finished"
    assert (tmp_path / "runs/tiny/events.csv").read_text().count("began") == 1
    last = (tmp_path / "runs/tiny/train/log.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["lm_loss"] is None


def _pipe(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "named", "what"),
    [
        (_pipe, "events.csv", "events.csv is not a regular file: remove it"),
        (Path.mkdir, "events.csv", "events.csv is not a regular file: remove it"),
        (lambda path: path.symlink_to("/dev/full"), "events.csv", "events.csv is not a regular file: remove it"),
        (_pipe, "train/job.json", "job.json is not a regular file: remove it"),
        (lambda path: path.symlink_to("train"), "train", "cannot be "),
        (_pipe, "train", "train is not a folder: remove it"),
        (Path.touch, "checkpoints", "checkpoints is not a folder: remove it"),
        (Path.touch, "train.claims", "train.claims is something else than a folder: remove it"),
    ],
)
def test_what_is_no_file_of_a_training_is_told_and_not_waited_for(
    make: Callable[[Path], None], named: str, what: str, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path)
    (tmp_path / "runs/tiny").mkdir(parents=True)
    make(tmp_path / "runs/tiny" / named)
    for more in ((), ("--resume",)):
        done = run("train", str(recipe), "--layout", "dp1,mbs4", *more, cwd=tmp_path, timeout_s=60)
        assert done.returncode == 2 and what in done.stderr.splitlines()[-1], done.stderr
        assert "Traceback" not in done.stderr


def started(recipe: Path, is_ready: Callable[[], bool]) -> subprocess.Popen[str]:
    """A training of two ranks beside its recipe, that is so far."""
    job = [TRIMARAN, "train", str(recipe), "--layout", "dp2,mbs1"]
    running = subprocess.Popen(job, cwd=recipe.parent, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not is_ready():
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return running


def test_sigterm_ends_a_training_in_one_line_and_leaves_no_rank(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("steps = 12", "steps = 100000\ncheckpoint_every = 0"))
    log = tmp_path / "runs/tiny/train/log.jsonl"
    running = started(recipe, lambda: log.exists() and log.stat().st_size > 0)
    running.send_signal(signal.SIGTERM)
    told = running.communicate(timeout=30)[1].strip().splitlines()
    assert running.returncode == 75 and told[-1] == (
        "trimaran: stopped before it could save; nothing was saved yet, so the same command begins at the first step"
    )
    size = log.stat().st_size
    time.sleep(0.5)
    assert log.stat().st_size == size, "a rank still writes"


def test_a_training_told_to_leave_as_a_rank_dies_leaves_too(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("steps = 12", "steps = 100000\ncheckpoint_every = 5"))
    events = tmp_path / "runs/tiny/events.csv"
    running = started(recipe, lambda: events.exists() and ",saved," in events.read_text())
    second = next(process for process in processes_in(tmp_path / "runs/tiny/train") if rank_of(process) == 1)
    os.kill(int(second.name), signal.SIGKILL)
    running.send_signal(signal.SIGTERM)
    told = running.communicate(timeout=60)[1].strip().splitlines()
    assert running.returncode == 75 and told[-1] == (
        "trimaran: stopped before it could save, as rank 1 was killed by SIGKILL; the same command with --resume goes "
        "on from what was saved"
    )
    assert not any("starting anew" in line for line in told)
    assert [row.split(",")[1] for row in events.read_text().splitlines()][-2:] == ["crash", "stopped"]


def test_the_fastest_layout_is_of_the_workload_as_the_recipe_states_it_now(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    shape = {"layers": 1, "hidden": 8, "heads": 1, "seq_len": 8, "vocab": 257, "gbs": 2, "mbs": 2, "dp": 1}
    row = {**shape, "sec_per_it": 1e-4, "recipe": "tiny", "layout_label": "dp1,tp1,pp1,mbs2"}
    with Store(tmp_path / "runs/tiny/store.sqlite") as store:
        store.add(Measurement.model_validate(row))
    done = run("train", str(recipe), cwd=tmp_path)
    assert done.returncode == 2 and "no layout of tiny was measured yet" in done.stderr


def test_the_fastest_layout_is_of_the_cluster_that_the_recipe_states_now(tmp_path: Path) -> None:
    """Rows of another cluster are other trials for bench and tune, and were the fastest layout for train."""
    recipe = load_recipe(str(tiny_recipe(tmp_path)))
    assert recipe.cluster is not None

    def row(layout: str, hardware: str | None, seconds: float) -> Measurement:
        cells = run_cells(recipe.workload, parse_layout(layout))
        of_run = {"recipe": "tiny", "sec_per_it": seconds, "devices": 1, "devices_per_node": 1, "hardware": hardware}
        return Measurement.model_validate(cells | of_run)

    workspace = Workspace(tmp_path / "runs/tiny")
    with Store(workspace.store) as store:
        store.add(row("dp1,mbs2", "another device", 1e-4))
        assert fastest_layout(recipe, workspace) is None
        store.add(row("dp1,mbs4", recipe.cluster.device.name or None, 1.0))
    assert str(fastest_layout(recipe, workspace)) == "dp1,tp1,pp1,mbs4"


@pytest.mark.parametrize("made_steps", [False, True])
def test_events_of_an_earlier_training_are_no_part_of_the_next_ones(tmp_path: Path, made_steps: bool) -> None:
    path = tmp_path / "events.csv"
    (tmp_path / "events-1.csv").write_text("of a training whose folder was removed\n")
    for kind, step in ((EventKind.BEGAN, 0), (EventKind.FAIL, 7 if made_steps else 0)):
        EventLog(path).add(Event(at=now(), event=kind, step=step, saved_step=0, layout="dp1"))
    set_events_aside(path, None)
    assert not path.exists()
    assert (tmp_path / "events-2.csv").exists() == made_steps, "what was refused before a step leaves nothing to keep"
    assert (tmp_path / "events-1.csv").read_text().startswith("of a training"), "nothing kept is written over"
