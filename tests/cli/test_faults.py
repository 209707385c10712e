"""Trainings go on by themselves after faults, and end as if nothing had happened."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command import tiny_recipe
from processes import processes_in, rank_of
from trimaran.files.recipe_file import load_recipe
from trimaran.layout.notation import parse_layout
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob, read_job
from trimaran.recipe.recipe import Recipe
from trimaran.study.train_recipe import layout_on
from trimaran.study.training import devices, lasting
from trimaran.study.training.run import PEERS_S, run_training
from trimaran.study.workspace import Workspace

OnStep = Callable[[dict[str, Any]], None]


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "WAITS_S", (0.0,))


class Study:
    """A tiny training in a folder, and what it left there."""

    def __init__(self, folder: Path, **train: object) -> None:
        stated = load_recipe(str(tiny_recipe(folder)))
        self.workspace = Workspace(folder / "runs")
        assert stated.cluster is not None
        self.cluster = stated.cluster
        settings = {"learning_rate": 1e-3, **train}
        self.recipe: Recipe = stated.model_copy(update={"train": stated.train.model_copy(update=settings)})
        self.data = self.workspace.data(self.recipe)
        self.told: list[str] = []

    def train(self, layout: str, on_step: OnStep = lambda line: None, folder: str = "train") -> Measurement:
        first = parse_layout(layout)
        return run_training(
            self.recipe, self.cluster, first, data_dir=self.data, out_dir=self.workspace.folder / folder,
            on_step=on_step, on_notice=self.told.append,
            layout_on=lambda count: layout_on(self.recipe, self.workspace, self.cluster, first, count),
        )  # fmt: skip

    def send(self, number: signal.Signals, rank: int) -> None:
        for process in processes_in(self.workspace.training):
            if rank_of(process) == rank:
                os.kill(int(process.name), number)

    def all_events(self) -> list[dict[str, str]]:
        with (self.workspace.folder / "events.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def events(self) -> list[dict[str, str]]:
        """Without checkpoints, and without ranks that other programs of this machine slow down."""
        return [event for event in self.all_events() if event["event"] not in ("saved", "slow")]

    def losses(self, folder: str = "train") -> list[float]:
        log = RunFile.LOG.of(self.workspace.folder / folder)
        return [json.loads(line)["lm_loss"] for line in log.read_text().splitlines()]


@pytest.mark.proof
def test_a_killed_rank_is_started_again_and_the_training_ends_as_if_undisturbed(tmp_path: Path) -> None:
    study = Study(tmp_path, steps=40, checkpoint_every=10)
    killed = []

    def kill_one(line: dict[str, Any]) -> None:
        if line["iteration"] >= 15 and not killed:
            killed.append(line["iteration"])
            study.send(signal.SIGKILL, 1)

    row = study.train("dp2,mbs2", kill_one)
    assert row.status == "ok" and len(row.losses) == 40
    _, first, fault, went_on, finished = study.events()
    assert [event["event"] for event in study.events()] == ["began", "first_step", "crash", "went_on", "finished"]
    assert float(first["seconds"]) > float(first["waited_s"]) and float(fault["seconds"]) == PEERS_S
    assert fault["rank"] == "1" and fault["why"] == "rank 1 was killed by SIGKILL" and fault["node"]
    assert int(fault["lost_steps"]) == int(fault["step"]) - int(fault["saved_step"]) >= 5
    assert float(went_on["seconds"]) > 0 and finished["step"] == "40"
    assert float(fault["lost_s"]) > 0 and float(went_on["seconds"]) > float(went_on["waited_s"])
    saved = [int(event["step"]) for event in study.all_events() if event["event"] == "saved"]
    # one that was in place as the rank died may have found nobody to tell
    assert saved[-1] == 40 and {20, 30} & {*saved} and {*saved} <= {10, 20, 30, 40}
    study.train("dp2,mbs2", folder="whole/train")
    assert study.losses() == study.losses("whole/train")


def test_what_an_earlier_training_left_is_not_gone_on_from_by_a_start_anew(tmp_path: Path) -> None:
    """Of a training that was begun anew: nodes may hold a state of the one before it until the first ranks begin."""
    study = Study(tmp_path, steps=5)

    def kill_first() -> None:
        while not (found := [each for each in processes_in(study.workspace.training) if rank_of(each) == 0]):
            time.sleep(0.002)
        os.kill(int(found[0].name), signal.SIGKILL)

    killer = threading.Thread(target=kill_first, daemon=True)
    killer.start()
    assert study.train("dp1,mbs4").status == "ok"
    killer.join()
    assert [event["event"] for event in study.events()] == ["began", "crash", "went_on", "finished"]
    assert not read_job(TrainJob, RunFile.JOB.of(study.workspace.training)).resume


@pytest.mark.proof
@pytest.mark.timeout(900)  # beside ranks of other tests its own have little of the cores
def test_a_rank_that_fails_twice_is_left_out_for_a_while_and_the_loss_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(devices, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    study = Study(tmp_path, steps=120, checkpoint_every=10)
    returned = False

    def kill_until_left_out(line: dict[str, Any]) -> None:
        nonlocal returned
        starts = [event for event in study.events() if event["event"] in ("began", "went_on")]
        alone = parse_layout(starts[-1]["layout"]).devices == 1
        # a checkpoint that is written as the rank dies is progress, so that two kills may be one too few
        if not alone and not returned and line["iteration"] % 10 == 4:
            study.send(signal.SIGKILL, 1)
        elif alone and not returned:
            clock[0], returned = clock[0] + devices.RETURNS_AFTER_S, True

    row = study.train("dp2,mbs2", kill_until_left_out)
    assert row.status == "ok"
    events = [event["event"] for event in study.events()]
    assert events.count("crash") in (2, 3) and events[-3:] == ["grown", "went_on", "finished"]
    layouts = [parse_layout(event["layout"]).devices for event in study.events()]
    assert [count for count, _ in groupby(layouts)] == [2, 1, 2]
    study.train("dp2,mbs2", folder="whole/train")
    assert study.losses()[:60] == pytest.approx(study.losses("whole/train")[:60], rel=1e-4)


@pytest.mark.proof
def test_starts_that_bring_no_newer_checkpoint_come_to_an_end(tmp_path: Path) -> None:
    study = Study(tmp_path, steps=500, checkpoint_every=400, restarts=2)
    dies = iter((0, 1, 0))

    def kill_always(line: dict[str, Any]) -> None:
        if line["iteration"] == 5:
            study.send(signal.SIGKILL, next(dies))

    with pytest.raises(TrimaranError, match="was killed by SIGKILL, and 2 starts anew in a row brought no newer"):
        study.train("dp2,mbs2", kill_always)
    again = ["crash", "went_on", "crash", "went_on", "crash"]
    assert [event["event"] for event in study.events()] == ["began", "first_step", *again]
    assert not processes_in(study.workspace.folder)


def test_a_fault_of_the_recipe_is_told_at_once(tmp_path: Path) -> None:
    study = Study(tmp_path, steps=20, learning_rate=9e18, min_learning_rate=0.0, weight_decay=9e18)
    with pytest.raises(TrimaranError, match="not finite from step"):
        study.train("dp1,mbs4")
    assert [event["event"] for event in study.events()] == ["began", "first_step", *["bad_loss"] * 10, "fail"]


class Turns:
    """Stops a rank for three times as long as it lets it work, in turns, from a step of the training on."""

    def __init__(self, study: Study, rank: int, works_s: float) -> None:
        self._study, self._rank, self._works_s = study, rank, works_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._take_turns, daemon=True)

    def _take_turns(self) -> None:
        while not self._ended.is_set():
            for number, seconds in ((signal.SIGSTOP, 3 * self._works_s), (signal.SIGCONT, self._works_s)):
                with contextlib.suppress(OSError, ValueError):
                    self._study.send(number, self._rank)
                time.sleep(seconds)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["dp2,mbs8", "tp2,mbs16", "pp2,mbs8"])
def test_a_rank_that_becomes_slow_is_named_within_twenty_steps(tmp_path: Path, layout: str) -> None:
    study = Study(tmp_path, steps=56, checkpoint_every=0)
    model = study.recipe.workload.model.model_copy(update={"layers": 4, "hidden": 128, "max_positions": 128})
    larger = {"model": model, "seq_len": 128, "global_batch": 16}
    workload = study.recipe.workload.model_copy(update=larger)
    study.recipe = study.recipe.model_copy(update={"workload": workload})
    turns, begun_at = Turns(study, rank=1, works_s=0.02), []

    def slow_one(line: dict[str, Any]) -> None:
        if line["iteration"] >= 30 and not begun_at:
            begun_at.append(line["iteration"])
            turns.begin()

    try:
        row = study.train(layout, slow_one)
    finally:
        turns.end()
    assert row.status == "ok"
    named = [event for event in study.all_events() if event["event"] == "slow" and event["rank"] == "1"]
    assert named, study.told
    # not `begun_at[0] <=`: on a busy machine another program may have slowed it before
    assert int(named[0]["step"]) <= begun_at[0] + 20
    assert "times the others' median over 20 steps" in named[0]["why"] and named[0]["node"] == socket.gethostname()
    assert any(text.startswith(f"step {named[0]['step']}: rank 1 on node") for text in study.told)


@pytest.mark.proof
def test_checkpoints_are_written_by_the_clock(tmp_path: Path) -> None:
    study = Study(tmp_path, steps=300, checkpoint_minutes=1e-4, keep_checkpoints=100)
    study.train("dp2,mbs2")
    saved = [text for text in study.told if text.startswith("checkpoint of step")]
    assert len(saved) >= 2, study.told
    # each waits for 50 times what the one before took, so that less than 2% of the time goes by
    assert len(saved) < 50


@pytest.mark.proof
def test_a_rank_that_comes_to_as_it_is_given_up_was_not_asked_to_leave(tmp_path: Path) -> None:
    """The watch asks a silent rank for its stacks by the signal by which schedulers ask a training to leave."""
    study = Study(tmp_path, steps=40, checkpoint_every=10)
    asked_for_stacks = 1 << (signal.SIGUSR1 - 1)

    def continue_when_asked(process: Path) -> None:
        for _ in range(6000):
            with contextlib.suppress(OSError):
                pending = [line.split()[1] for line in (process / "status").read_text().splitlines() if "Pnd:" in line]
                if any(int(mask, 16) & asked_for_stacks for mask in pending):
                    os.kill(int(process.name), signal.SIGCONT)
                    return
            time.sleep(0.01)

    waiting: list[threading.Thread] = []

    def stop_one(line: dict[str, Any]) -> None:
        if line["iteration"] >= 15 and not waiting:
            (rank,) = (process for process in processes_in(study.workspace.training) if rank_of(process) == 0)
            os.kill(int(rank.name), signal.SIGSTOP)
            waiting.append(threading.Thread(target=continue_when_asked, args=(rank,), daemon=True))
            waiting[0].start()

    row = study.train("dp1,mbs4", stop_one)
    waiting[0].join()
    assert row.status == "ok" and len(row.losses) == 40
    assert [event["event"] for event in study.events()] == ["began", "first_step", "hang", "went_on", "finished"]
