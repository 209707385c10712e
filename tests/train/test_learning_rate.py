from __future__ import annotations

import pytest

from trimaran.recipe import TrainSettings
from trimaran.train.learning_rate import learning_rate

SETTINGS = TrainSettings(steps=100, learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=10)


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert [learning_rate(SETTINGS, step) for step in (0, 4, 9)] == pytest.approx([1e-4, 5e-4, 1e-3])


def test_cosine_falls_from_the_peak_to_the_minimum_and_stays() -> None:
    assert learning_rate(SETTINGS, 10) == pytest.approx(1e-3)
    assert learning_rate(SETTINGS, 55) == pytest.approx(5.5e-4)
    assert [learning_rate(SETTINGS, step) for step in (100, 5000)] == pytest.approx([1e-4, 1e-4])


def test_a_rate_below_the_minimum_never_rises() -> None:
    low = SETTINGS.model_copy(update={"learning_rate": 5e-5, "warmup_steps": 0})
    assert {learning_rate(low, step) for step in (0, 50, 100)} == {5e-5}
