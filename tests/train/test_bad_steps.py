"""Bad steps: told alike on every layout, and stopped at, skipped, or gone back from as the recipe says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from torch.profiler import profile

from pool import Pool, Run
from test_gpt import make_trainer
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob
from trimaran.protocol.phases import Heartbeat, RankPhase
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.engine.bad_steps import Losses
from trimaran.train.run.course import Course, StopSignals
from trimaran.train.state.manifest import read_manifest, saved_steps

Maker = Callable[..., TrainJob]
BATCH = 24


class Phases(Heartbeat):
    """Signs of life of a rank in its steps, and the phases that it enters."""

    def __init__(self, job: TrainJob) -> None:
        self.file = RunFile.HEARTBEAT.of(job.out_dir, 0)
        super().__init__(self.file)
        self.entered: list[str] = []
        self.enter(RankPhase.STEP)

    def enter(self, phase: RankPhase) -> None:
        self.entered.append(phase)
        super().enter(phase)


LAYOUTS = ["dp2,mbs12", "dp2,tp2,pp2,mbs6,zero1"]


@pytest.fixture
def train(pool: Pool, make_job: Maker, tmp_path: Path) -> Callable[..., Run]:
    """Train to the end, a checkpoint every second step; `poison` are samples whose batch has no finite loss."""

    def run(layout: str, *, poison: tuple[int, ...] = (), folder: str = "checkpoints", **settings: object) -> Run:
        constant = {"learning_rate": 1e-3, "min_learning_rate": 1e-3, "checkpoint_every": 2}
        job = make_job(layout, **{**constant, **settings})
        return pool.run(job.model_copy(update={"checkpoint_dir": str(tmp_path / folder)}), poison=poison)

    return run


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_goes_back_and_leaves_out_the_data_of_a_bad_batch(train: Callable[..., Run], layout: str) -> None:
    poison = (4 * BATCH + 7,)  # of step 5, the first behind a checkpoint
    skipped = train(layout, steps=9, poison=poison, on_bad_loss="skip", folder="skip")
    back = train(layout, steps=8, poison=poison, on_bad_loss="go_back")
    assert math.isnan(back.losses[4]) and math.isnan(skipped.losses[4])
    # one more step is made, and what follows is the data behind it; nothing of the bad batch is left
    assert len(back.losses) == 9
    assert back.losses[:4] + back.losses[5:] == skipped.losses[:4] + skipped.losses[5:]
    (told,) = back.of_kind("bad_loss")
    assert (told["step"], told["back_to"]) == (5, 4) and told["done"].startswith("goes back to step 4, and on with")
    (told,) = skipped.of_kind("bad_loss")
    assert told["back_to"] is None and told["why"] == "the loss is not finite: nan"


def test_the_data_position_behind_a_bad_batch_is_saved(train: Callable[..., Run], tmp_path: Path) -> None:
    train("dp2,mbs12", steps=6, poison=(5 * BATCH,), on_bad_loss="go_back")
    newest = read_manifest(tmp_path / "checkpoints" / "step-00000006")
    assert newest.consumed_samples == 8 * BATCH  # steps 5 and 6 of the first try are left out
    # before there is a checkpoint, the batch alone is left out
    early = train("dp2,mbs12", steps=3, poison=(0,), on_bad_loss="go_back", folder="early")
    assert early.of_kind("bad_loss")[0]["back_to"] is None and len(early.losses) == 3


@pytest.mark.parametrize(("policy", "made"), [("stop", 7), ("skip", 7), ("go_back", 7)])
def test_a_stated_count_of_bad_steps_ends_a_training_and_the_good_checkpoint_stays(
    train: Callable[..., Run], tmp_path: Path, policy: str, made: int
) -> None:
    rotten = tuple(range(4 * BATCH, 40 * BATCH, BATCH))
    run = train("dp2,mbs12", steps=20, poison=rotten, on_bad_loss=policy, bad_steps=3)
    assert len(run.losses) == made and len(run.of_kind("bad_loss")) == 3
    (refused,) = run.of_kind("refused")
    assert "is not finite" in refused["text"] and "lower train.learning_rate" in refused["text"]
    assert "the 3. bad step" in refused["text"] if policy == "go_back" else "from step 5 on, 3 steps" in refused["text"]
    if policy != "skip":
        assert saved_steps(tmp_path / "checkpoints")[0] == 4


@pytest.mark.proof
def test_layouts_agree_on_which_steps_leap(train: Callable[..., Run]) -> None:
    """At a rate of all but zero losses scatter around one median, and some stand out by half a sigma."""
    flat = {"steps": 30, "learning_rate": 1e-6, "min_learning_rate": 1e-6, "on_bad_loss": "skip",
            "spike_sigmas": 0.5, "spike_steps": 10, "bad_steps": 100}  # fmt: skip
    runs = [train(layout, folder=layout[:3], **flat) for layout in ("dp2,mbs12", "tp2,mbs24")]
    first, second = ([notice["step"] for notice in run.of_kind("bad_loss")] for run in runs)
    assert first and first == second
    assert "the median of 10 steps" in runs[0].of_kind("bad_loss")[0]["why"]


def judged(losses: list[float], **settings: object) -> list[int]:
    judge = Losses(TrainSettings.model_validate(settings))
    return [place for place, loss in enumerate(losses) if judge.judge(loss, 1.0)]


def test_a_leap_is_told_by_the_median_of_good_steps_and_not_before_there_are_enough() -> None:
    falling = [5.0 - step / 100 + 0.01 * (-1) ** step for step in range(100)]
    leaps = {"spike_sigmas": 6.0, "spike_steps": 20}
    assert judged(falling, **leaps) == []
    assert judged([*falling[:50], 5.5, *falling[50:]], **leaps) == [50]
    assert judged([*falling[:10], 9.0, *falling[10:]], **leaps) == [], "no median of 20 steps yet"
    # one that stays is told again and again: what is bad is no part of the median
    assert judged([*falling[:50], *[7.0] * 5], **leaps) == [50, 51, 52, 53, 54]
    assert judged([*falling[:50], 50.0, math.nan, math.inf]) == [51, 52], "leaps are off by default"


def test_what_leaps_are_told_by_outlives_a_checkpoint() -> None:
    settings = TrainSettings(spike_sigmas=6.0, spike_steps=10)
    before, after = Losses(settings), Losses(settings)
    for step in range(30):
        assert before.judge(3.0 + 0.01 * (step % 3), 1.0) is None
    after.recent = before.recent
    assert len(after.recent) == 10 and after.judge(4.0, 1.0) == before.judge(4.0, 1.0) is not None
    assert before.judge(3.0, math.inf) == "the gradient's norm is not finite: inf" and before.judge(3.0, None) is None


def test_a_training_without_checkpoints_cannot_go_back() -> None:
    with pytest.raises(ValueError, match=r"on_bad_loss is .go_back. and checkpoint_every is 0"):
        TrainSettings(on_bad_loss="go_back", checkpoint_every=0)


@pytest.mark.parametrize("ends", ["told to leave", "a bad loss"])
def test_steps_that_are_profiled_are_written_down_however_a_training_ends(make_job: Maker, ends: str) -> None:
    job = make_job("mbs24", steps=9, bad_steps=1).model_copy(update={"trace_steps": 5})
    job = job.model_copy(update={"checkpoint_dir": str(Path(job.out_dir) / "checkpoints")})
    trainer, stop = make_trainer(job), SimpleNamespace(seen=False)
    healthy = trainer.forward_backward
    heartbeat = Phases(job)
    course = Course(trainer, cast(StopSignals, stop), lambda kind, /, **fields: None, heartbeat)
    ended = False
    while not ended:
        assert trainer.step_number < 4, "the training has not ended"
        if trainer.step_number == 3 and ends == "a bad loss":
            trainer.forward_backward = lambda: healthy() * math.nan  # type: ignore[method-assign]
        stop.seen = trainer.step_number == 3 and ends == "told to leave"
        course.before()
        result = trainer.step()
        try:
            ended = course.after(result)
        except TrimaranError:
            ended = True
    names = [event.get("name") for event in json.loads((Path(job.out_dir) / "trace.0.json").read_text())["traceEvents"]]
    assert names.count("aten::_fused_adamw_") >= 1
    assert heartbeat.entered == ["step", "profile", "step"]


def test_steps_that_are_profiled_are_written_down_in_a_phase_of_their_own(
    make_job: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a million operators it takes longer than a rank may be silent in a step."""
    job = make_job("mbs24", steps=9).model_copy(update={"trace_steps": 1})
    trainer, heartbeat, seen = make_trainer(job), Phases(job), list[str]()
    course = Course(trainer, None, lambda kind, /, **fields: None, heartbeat)
    export = profile.export_chrome_trace

    def exported(of: profile, path: str) -> None:
        seen.append(heartbeat.entered[-1])
        export(of, path)

    monkeypatch.setattr(profile, "export_chrome_trace", exported)
    for _ in range(4):
        course.before()
        course.after(trainer.step())
    assert seen == ["profile"] and heartbeat.entered == ["step", "profile", "step"]


def test_going_back_reads_the_checkpoint_in_the_phase_of_those_that_resume(make_job: Maker) -> None:
    """Ranks that have less of it to read wait for the others, and all leave that phase together."""
    job = make_job("mbs24", steps=9, on_bad_loss="go_back", checkpoint_every=1)
    job = job.model_copy(update={"checkpoint_dir": str(Path(job.out_dir) / "checkpoints")})
    trainer, heartbeat = make_trainer(job), Phases(job)
    healthy = trainer.forward_backward
    course = Course(trainer, None, lambda kind, /, **fields: None, heartbeat)
    course.before()
    course.after(trainer.step())
    trainer.forward_backward = lambda: healthy() * math.nan  # type: ignore[method-assign]
    course.before()
    course.after(trainer.step())
    assert trainer.step_number == 1 and heartbeat.entered == ["step", "resume", "step"]
    assert heartbeat.file.read_text().strip() == "step"
