"""What a training's watcher makes of the lines and notices that its ranks write down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trimaran.bench.trial.trial import Trial
from trimaran.files.catalogue import load_cluster
from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob
from trimaran.recipe.train_settings import TrainSettings
from trimaran.study.training.events import EventLog
from trimaran.study.training.lasting import Lasting, LastingTraining
from trimaran.study.training.stopping import BEGIN_ANEW, GO_ON
from trimaran.study.training.telling import Teller


def write(file: Path, *records: dict[str, Any]) -> None:
    with file.open("a") as opened:
        opened.writelines(json.dumps(record) + "\n" for record in records)


def lines(*iterations: int) -> list[dict[str, Any]]:
    return [{"iteration": iteration, "sec_per_it": 1.0} for iteration in iterations]


def test_steps_made_again_are_counted_though_they_are_seen_with_the_notice_that_undid_them(tmp_path: Path) -> None:
    """Steps of milliseconds: between two looks a checkpoint is written, the training goes back to it and on."""
    shown, events = list[int](), list[dict[str, Any]]()
    teller = Teller(tmp_path, lambda line: shown.append(line["iteration"]), lambda text: None, events.append)
    write(RunFile.LOG.of(tmp_path), *lines(1, 2, 3, 4, 5, 3, 4))
    write(
        RunFile.NOTICES.of(tmp_path),
        {"kind": "saved", "step": 2, "path": "step-00000002", "write_s": 0.1, "blocked_s": 0.1, "waited_s": 0.0},
        {"kind": "bad_loss", "step": 5, "why": "nan", "done": "goes back to step 2", "back_to": 2},
    )
    teller.tell()
    assert shown == [1, 2, 3, 4, 5, 3, 4]
    assert [(event["kind"], event["step"]) for event in events] == [("saved", 2), ("bad_loss", 5)]
    assert events[-1]["lost_s"] == 3.0, "steps 3 to 5"
    assert teller.last_step == 4
    assert teller.lost_s(2) == 2.0, "a fault now loses steps 3 and 4"


def test_lines_of_the_training_that_is_gone_on_from_are_no_steps(tmp_path: Path) -> None:
    shown = list[int]()
    teller = Teller(tmp_path, lambda line: shown.append(line["iteration"]), lambda text: None)
    write(
        RunFile.NOTICES.of(tmp_path),
        {"kind": "resumed", "step": 4, "path": "step-00000004", "layout": "dp1", "changed": []},
        {"kind": "bad_loss", "step": 6, "why": "nan", "done": "goes back to step 2", "back_to": 2},
    )
    write(RunFile.LOG.of(tmp_path), *lines(1, 2, 3, 4, 5, 6, 3))
    teller.tell()
    assert shown == [5, 6, 3] and teller.last_step == 3 and teller.made_steps


@pytest.mark.parametrize("kept", ["a checkpoint", "a snapshot"])
def test_what_no_notice_told_of_yet_is_gone_on_from(tmp_path: Path, kept: str) -> None:
    """Ranks may be ended behind the renaming of their first checkpoint, before they have told of it.

    That nothing was saved would have the user begin anew, which puts the checkpoint aside.
    """
    job = SimpleNamespace(out_dir=str(tmp_path), checkpoint_dir=str(tmp_path / "checkpoints"), resume=False)
    first = cast(Any, SimpleNamespace(job=job, cluster=SimpleNamespace(devices=2)))
    nothing = cast(Any, None)
    training = LastingTraining(
        first, Lasting(0, nothing), nothing, nothing, EventLog(tmp_path / "events.csv"), nothing, lambda text: None
    )
    assert training.way_on == BEGIN_ANEW
    if kept == "a checkpoint":
        (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    else:
        write(
            RunFile.NOTICES.of(tmp_path),
            {"kind": "held", "step": 5, "blocked_s": 0.1, "held_s": 0.1, "gib": {"n0": 0.1, "n1": 0.1}},
        )
        training._teller.tell()
    assert training.way_on == f"{GO_ON} from what was saved"


@pytest.mark.parametrize("traced", [False, True])
def test_a_start_anew_profiles_the_steps_that_the_one_before_did_not_come_to(tmp_path: Path, traced: bool) -> None:
    out_dir, model = tmp_path / "train", Model(layers=1, hidden=8, heads=1, vocab=257)
    out_dir.mkdir()
    job = TrainJob(
        workload=Workload(model=model, seq_len=8, global_batch=2), layout=parse_layout("dp1,mbs2"), stage_split=(1,),
        train=TrainSettings(), data_dir=str(tmp_path), out_dir=str(out_dir), steps=60,
    )  # fmt: skip
    plain = Trial("key", cast(Any, None), load_cluster("fugaku-a64fx"), job)
    first = replace(plain, job=job.model_copy(update={"trace_steps": 3}))
    nothing = cast(Any, None)
    launcher = cast(Any, SimpleNamespace(nodes_left=lambda: None))
    training = LastingTraining(
        first, Lasting(1, lambda layout: plain), launcher, nothing, EventLog(tmp_path / "events.csv"), nothing, nothing
    )
    write(RunFile.LOG.of(out_dir), *lines(1, 2))
    if traced:
        RunFile.TRACE.of(out_dir, 0).touch()
    for _ in range(2):
        training._make_ready(grown=False)
        assert training._trial.job.trace_steps == (0 if traced else 3)
    assert (tmp_path / "train-1").is_dir()
