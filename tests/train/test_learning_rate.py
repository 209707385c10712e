from __future__ import annotations

import pytest
from pydantic import ValidationError

from trimaran.nouns.workload import RampUp
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.engine.learning_rate import Position, learning_rate

SETTINGS = TrainSettings(steps=100, learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=10)
BATCH, SEQ_LEN = 8, 16


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
