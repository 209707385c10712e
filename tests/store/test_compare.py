"""Two runs are compared by their step times, without belief in any distribution of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trimaran.nouns.measurement import Measurement
from trimaran.store.compare import compare, timed_steps

SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 256, "mbs": 1, "gbs": 8}


def run(times: list[float], warmup: int = 0, **fields: object) -> Measurement:
    median = float(np.median(times[warmup:]))
    return Measurement.model_validate({**SHAPE, "step_times_s": tuple(times), "sec_per_it": median, **fields})


def steps(seed: int, center: float, n: int = 40) -> list[float]:
    """Step times as machines have them: a few per cent of scatter, and now and then a straggler."""
    random = np.random.default_rng(seed)
    times = center * np.exp(0.02 * random.standard_normal(n))
    times[random.random(n) < 0.05] *= 3.0
    return [float(t) for t in times]


def test_a_true_difference_is_found_with_its_size() -> None:
    found = compare(run(steps(1, 1.0)), run(steps(2, 0.95)))
    assert found.low is not None and found.high is not None and found.p_value is not None
    assert found.low < 0.95 < found.high < 1.0 and found.p_value < 0.001
    assert "less time than A" in found.verdict


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    held = 0
    for seed in range(200):
        found = compare(run(steps(2 * seed, 1.0)), run(steps(2 * seed + 1, 1.0)))
        assert found.low is not None and found.high is not None
        held += found.low <= 1.0 <= found.high
    # 95% of 200, give or take three standard errors
    assert abs(held - 190) <= 3 * math.sqrt(200 * 0.95 * 0.05)


def test_equal_runs_are_not_told_apart_and_say_so() -> None:
    assert "do not tell the runs apart" in compare(run(steps(3, 1.0)), run(steps(3, 1.0))).verdict


def test_warm_up_steps_do_not_count() -> None:
    assert timed_steps(run([9.0, 8.0, 1.0, 1.2, 1.1], warmup=2)) == [1.0, 1.2, 1.1]
    assert timed_steps(run([1.0, 1.2, 1.1])) == [1.0, 1.2, 1.1]


@pytest.mark.parametrize("times", [[1.0], [1.0, 1.1, 1.2]])
def test_too_few_steps_give_a_difference_without_confidence(times: list[float]) -> None:
    found = compare(run(times), run([2.0 * t for t in times]))
    assert found.ratio == pytest.approx(2.0) and (found.low, found.p_value) == (None, None)
    assert "too few" in found.verdict


def test_a_published_row_has_no_steps_and_one_that_failed_no_time() -> None:
    published = Measurement.model_validate({**SHAPE, "sec_per_it": 2.0})
    failed = Measurement.model_validate({**SHAPE, "status": "oom", "tp": 2})
    assert "no step times are kept" in compare(published, published).verdict
    found = compare(published, failed)
    assert found.ratio is None and "not timed" in found.verdict
    assert found.differs["tp"] == (1, 2) and found.differs["status"] == ("ok", "oom")


def test_very_long_runs_are_compared_within_memory() -> None:
    found = compare(run(steps(5, 1.0, 50_000)), run(steps(6, 1.01, 50_000)))
    assert found.low is not None and found.low > 1.0 and found.steps == (50_000, 50_000)
