from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pool import Pool
from trimaran.nouns.workload import RampUp
from trimaran.protocol.job import TrainJob
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.engine.learning_rate import Position, learning_rate

SETTINGS = TrainSettings(steps=100, learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=10)
BATCH, SEQ_LEN = 8, 16
RAMP = RampUp(start=8, increment=8, samples=240)


def rate(settings: TrainSettings, step: int) -> float:
    return learning_rate(settings, Position(step, step * BATCH, BATCH, SEQ_LEN))


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert [rate(SETTINGS, step) for step in (0, 4, 9)] == pytest.approx([1e-4, 5e-4, 1e-3])


def test_cosine_falls_from_the_peak_to_the_minimum_and_stays() -> None:
    assert rate(SETTINGS, 10) == pytest.approx(1e-3)
    assert rate(SETTINGS, 55) == pytest.approx(5.5e-4)
    assert [rate(SETTINGS, step) for step in (100, 5000)] == pytest.approx([1e-4, 1e-4])


def test_a_rate_below_the_minimum_never_rises() -> None:
    low = SETTINGS.model_copy(update={"learning_rate": 5e-5, "warmup_steps": 0})
    assert {rate(low, step) for step in (0, 50, 100)} == {5e-5}


def test_steps_samples_and_tokens_state_the_same_schedule_while_the_batch_is_constant() -> None:
    plain = {"steps": 100, "learning_rate": 1e-3, "min_learning_rate": 1e-4}
    by_samples = TrainSettings(**plain, warmup_samples=10 * BATCH, decay_samples=100 * BATCH)
    by_tokens = TrainSettings(**plain, warmup_tokens=10 * BATCH * SEQ_LEN, decay_tokens=100 * BATCH * SEQ_LEN)
    for step in range(120):
        assert rate(by_samples, step) == pytest.approx(rate(SETTINGS, step))
        assert rate(by_tokens, step) == pytest.approx(rate(SETTINGS, step))


def test_by_samples_a_ramp_up_of_the_batch_does_not_move_the_schedule() -> None:
    settings = TrainSettings(learning_rate=1e-3, min_learning_rate=1e-4, warmup_samples=64, decay_samples=1000)
    ramp = RampUp(start=8, increment=8, samples=160)
    samples, rates = 0, {}
    for step in range(60):
        batch = ramp.batch_at(samples, 32)
        rates[samples] = learning_rate(settings, Position(step, samples, batch, SEQ_LEN))
        samples += batch
    constant = {n: learning_rate(settings, Position(0, n, 32, SEQ_LEN)) for n in rates if n >= 64}
    assert constant == {n: rates[n] for n in constant} and len(constant) > 40


@pytest.mark.parametrize(
    "spans",
    [
        {"warmup_samples": 10},
        {"warmup_tokens": 10, "decay_samples": 100},
        {"warmup_steps": 5, "decay_tokens": 100},
        {"warmup_samples": 100, "decay_samples": 50},
        {"warmup_steps": 100, "decay_steps": 50},
    ],
    ids=str,
)
def test_a_schedule_is_stated_whole_and_in_one_unit(spans: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="warmup_"):
        TrainSettings.model_validate(spans)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        # 24 samples were seen in three steps of 8, and the fourth has 8 too: (24 + 8) / 200 of the peak
        ({"ramp_up": RAMP}, {"ramp_up": RAMP, "learning_rate": 2e-3}, "0.00032 instead of 0.00016"),
        # 72 samples were seen: (72 + 12) / 200 and (72 + 24) / 200 of the peak
        ({}, {"global_batch": 12}, "0.00042 instead of 0.00048"),
    ],
    ids=["ramp-up", "another batch"],
)
def test_a_changed_rate_is_told_of_the_batch_that_the_next_step_has(
    pool: Pool, make_job: Callable[..., TrainJob], tmp_path: Path, before: Any, after: Any, says: str
) -> None:
    for stated, steps in ((before, 3), (after, 4)):
        settings = {"warmup_samples": 200, "decay_samples": 400, "learning_rate": 1e-3} | stated
        of_workload = {"global_batch": settings.pop("global_batch", 24), "ramp_up": settings.pop("ramp_up", None)}
        job = make_job("dp2,mbs2", steps=4, checkpoint_every=3, **settings)
        workload = job.workload.model_copy(update=of_workload)
        update = {"workload": workload, "steps": steps, "checkpoint_dir": str(tmp_path), "resume": True}
        run = pool.run(job.model_copy(update=update))
    (told,) = run.of_kind("resumed")
    assert f"the next step's learning rate is {says}" in told["changed"]
