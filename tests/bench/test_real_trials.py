"""Claims about trials of the real trainer: real ranks, real text, real time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from processes import processes_in, rank_of
from trimaran.bench.launch.contract import Launch
from trimaran.bench.launch.local import LocalLauncher, LocalRanks
from trimaran.bench.sweep import run_sweep
from trimaran.bench.trial.trial import Trial, prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.files import RunFile
from trimaran.protocol.programs import TRAINER
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store, this_boot
from trimaran.study.measure_recipe import measure_timeline
from trimaran.study.training import run as training
from trimaran.study.training.run import run_training
from trimaran.study.workspace import Workspace


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("To be, or not to be, that is the question. " * 2000)
    return path


@pytest.fixture
def real(recipe: Recipe, text: Path) -> Recipe:
    model = recipe.workload.model.model_copy(update={"vocab": 384})  # the tokenizer of bytes has a few more than 256
    return recipe.model_copy(
        update={
            "data": DataSettings(paths=(str(text),), tokenizer="bytes"),
            "workload": recipe.workload.model_copy(update={"model": model}),
        }
    )


@pytest.fixture
def launcher() -> Iterator[LocalLauncher]:
    with contextlib.closing(LocalLauncher()) as launcher:
        yield launcher


@pytest.mark.proof
@pytest.mark.timeout(900)  # a busy machine loads PyTorch slowly
def test_a_sweep_of_the_real_trainer_measures_every_kind_of_parallelism(
    real: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    workspace = Workspace(tmp_path)
    layouts = [parse_layout(text) for text in ("dp1,mbs4", "dp2,mbs2", "tp2,mbs4,recompute-full", "pp2,mbs2")]
    with Store(workspace.store) as store:
        rows = run_sweep(
            real, cluster, layouts, store, data_dir=workspace.data(real), work_dir=workspace.trials,
            limits=Limits(timeout_s=250),
        )  # fmt: skip
    for row in rows:
        assert row.status == "ok", row.evidence
        assert row.sec_per_it is not None
        assert 1e-4 < row.sec_per_it < 30
        assert len(row.step_times_s) == len(row.losses) == 6
        assert len(row.mem_gib_per_rank) == row.devices
        assert 0.05 < (row.mem_gib or 0) < 8
        assert row.losses[0] == pytest.approx(math.log(384), abs=0.5)
        assert row.losses == pytest.approx(rows[0].losses, rel=1e-4), "the loss is the same on every layout"


def trial_in(folder: Path, recipe: Recipe, cluster: Cluster, layout: str) -> Trial:
    workspace = Workspace(folder)
    data_dir = workspace.data(recipe)
    return prepare_trial(recipe, cluster, parse_layout(layout), data_dir=data_dir, work_dir=workspace.trials)


def listening_addresses(folder: Path) -> set[str]:
    """Addresses (hexadecimal, as the kernel prints them) on which processes that work in `folder` listen."""
    sockets = set()
    for process in processes_in(folder):
        with contextlib.suppress(OSError):
            sockets |= {str(fd.readlink()) for fd in (process / "fd").iterdir()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


def test_ranks_listen_on_the_loopback_alone(
    launcher: LocalLauncher, real: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    trial = trial_in(tmp_path, real, cluster, "dp2,mbs2")
    seen: set[str] = set()
    row = run_trial(
        trial,
        launcher,
        Limits(timeout_s=250),
        on_step=lambda step: seen.update(listening_addresses(tmp_path)),
    )
    assert row.status == "ok", row.evidence
    assert seen == {"0100007F"}  # 127.0.0.1


def test_what_the_trainer_refuses_is_a_failure_with_its_own_words(
    launcher: LocalLauncher, real: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    trial = prepare_trial(real, cluster, parse_layout("dp1,mbs4"), data_dir=tmp_path / "no", work_dir=tmp_path)
    row = run_trial(trial, launcher, Limits(timeout_s=250))
    assert row.status == "fail"
    first = (row.evidence or "").splitlines()[0]
    assert first.startswith("rank 0 refused: ") and "trimaran: " not in first


@pytest.mark.proof
def test_a_real_trial_over_its_memory_limit_is_out_of_memory(
    launcher: LocalLauncher, real: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    workspace = Workspace(tmp_path)
    large = real.workload.model.model_copy(update={"vocab": 400_000})  # 400 MB of weights, gradients, moments
    recipe = real.model_copy(update={"workload": real.workload.model_copy(update={"model": large})})
    trial = prepare_trial(
        recipe, cluster, parse_layout("dp1,mbs4"), data_dir=workspace.data(real), work_dir=workspace.trials
    )
    row = run_trial(trial, launcher, Limits(timeout_s=250, memory_gib=0.4))
    assert row.status == "oom", row.evidence
    assert "the trial's limit is 0.40 GiB" in (row.evidence or "")


class StartedRanks(LocalLauncher):
    """Starts every rank by itself, as it would one of another program."""

    def start(self, launch: Launch) -> LocalRanks:
        python, *rest = launch.command
        return super().start(replace(launch, command=(python, "-u", *rest)))


@pytest.mark.proof
def test_a_forked_rank_learns_and_holds_what_a_started_one_does(
    launcher: LocalLauncher, real: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    workspace = Workspace(tmp_path)
    data = workspace.data(real)
    rows, import_s = {}, {}
    # the second forked trial meets another environment and number of ranks than the first
    cases = (
        ("forked", launcher, "tp2,mbs2"),
        ("started", StartedRanks(), "dp2,mbs2"),
        ("forked", launcher, "dp2,mbs2"),
    )
    for name, starting, layout in cases:
        trial = prepare_trial(real, cluster, parse_layout(layout), data_dir=data, work_dir=tmp_path / name)
        rows[name] = run_trial(trial, starting, Limits(timeout_s=250))
        assert rows[name].status == "ok", rows[name].evidence
        import_s[name] = json.loads(RunFile.RESULT.of(trial.job.out_dir).read_text())["startup_s"]["import_torch"]
    assert import_s["forked"] < 0.1 * import_s["started"], "a forked rank finds PyTorch imported"
    assert rows["forked"].losses == rows["started"].losses
    assert rows["forked"].mem_gib == pytest.approx(rows["started"].mem_gib, rel=0.05)


@pytest.mark.proof
def test_forked_ranks_end_with_the_process_they_were_forked_from(
    launcher: LocalLauncher, real: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    trial = trial_in(tmp_path, real, cluster, "dp2,mbs2")
    long = replace(trial, job=trial.job.model_copy(update={"steps": 80}))
    killed: list[int] = []

    def kill_the_parent(_step: int) -> None:
        ranks = processes_in(tmp_path)
        if ranks and not killed:
            parent = int((ranks[0] / "stat").read_text().rpartition(")")[2].split()[1])
            assert parent != os.getpid(), "the ranks were started, not forked"
            os.kill(parent, signal.SIGKILL)
            killed.append(parent)

    launcher.restarts = 0
    row = run_trial(long, launcher, Limits(timeout_s=250), on_step=kill_the_parent)
    assert row.status == "lost", row.evidence
    assert (row.evidence or "").startswith("the process that the ranks were forked from was ended")
    assert processes_in(tmp_path) == []
    launcher.restarts = 1
    killed.clear()
    row = run_trial(long, launcher, Limits(timeout_s=250), on_step=kill_the_parent)
    assert row.status == "ok" and len(killed) == 1, "another process takes its place, and the trial is run again"


@pytest.mark.proof
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_of_a_training_is_named_soon(
    real: Recipe, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """The others wait for it, and any of them may have been silent first."""
    monkeypatch.setattr(training, "HANG_FLOOR_S", 3.0)
    workspace, stopped = Workspace(tmp_path), []
    long = real.model_copy(
        update={"train": real.train.model_copy(update={"steps": 100_000, "checkpoint_every": 0, "restarts": 0})}
    )

    def stop_one(line: dict[str, object]) -> None:
        if line["iteration"] >= 5 and not stopped:
            ranks = {rank_of(process): int(process.name) for process in processes_in(workspace.training)}
            os.kill(ranks[victim], signal.SIGSTOP)
            stopped.append(time.monotonic())

    with pytest.raises(TrimaranError, match=f"ended as hang: rank {victim} is stopped; rank . gave no sign for"):
        run_training(
            long, cluster, parse_layout("dp2,mbs2"), data_dir=workspace.data(long), out_dir=workspace.training,
            on_step=stop_one,
        )  # fmt: skip
    assert time.monotonic() - stopped[0] < 30


def test_an_interpreter_without_pytorch_is_told_by_its_ranks(
    launcher: LocalLauncher, real: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    trial = trial_in(tmp_path, real, cluster, "dp1,mbs4")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    row = run_trial(trial, launcher, Limits(timeout_s=250), worker=(str(bare), *TRAINER))
    assert row.status == "fail"
    assert "No module named" in (row.evidence or "")


def test_a_timeline_is_recorded_when_no_trial_of_the_study_runs(
    trainable: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    """It ran beside a sweep's trials and lengthened them, and a second one removed the folder of the first."""
    study, machine, told = Workspace(tmp_path / "study"), f"machine-{this_boot()}", list[str]()
    stated = trainable.model_copy(update={"cluster": cluster})

    with Store(study.store) as sweep:

        def say(text: str) -> None:
            told.append(text)
            if "waiting" in text:
                sweep.release(machine)

        assert sweep.claim(machine)
        timeline = measure_timeline(stated, study, parse_layout("dp1,mbs1"), say=say)
        assert timeline.events
        assert [text for text in told if "measures in this store; waiting" in text]
        assert sweep.claim(machine), "it is given back"
