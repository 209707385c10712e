"""A slow rank is named by its own time, as soon as the median says so, and once."""

from __future__ import annotations

import pytest

from trimaran.layout.notation import parse_layout
from trimaran.train.run.slow_ranks import FACTOR, STEPS, SlowRanks


def named(layout: str, steps: list[list[float]], samples: int = 8) -> list[tuple[int, int]]:
    """Steps and ranks that are named."""
    slow = SlowRanks(parse_layout(layout))
    return [(step, one.rank) for step, own_s in enumerate(steps) for one in slow.after(own_s, samples)]


@pytest.mark.parametrize("layout", ["dp4,mbs1", "tp4,mbs1", "dp2,tp2,mbs1", "pp4,mbs1"])
def test_a_rank_that_becomes_slow_is_named_once_within_twenty_steps(layout: str) -> None:
    even, late = [0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.18, 0.1]
    ((step, rank),) = named(layout, [even] * 30 + [late] * 60)
    assert rank == 2 and 30 < step < 30 + STEPS


def test_a_rank_that_is_slow_from_the_start_is_named_where_others_do_the_same_work() -> None:
    assert named("dp4,mbs1", [[0.1, 0.2, 0.1, 0.1]] * 30) == [(STEPS - 1, 1)]
    # of two the slower one
    assert named("dp2,mbs1", [[0.2, 0.1]] * 30) == [(STEPS - 1, 0)]


def test_stages_of_unequal_work_a_growing_batch_and_single_stalls_are_not_slow() -> None:
    assert named("pp2,dp2,mbs1", [[0.1, 0.1, 0.3, 0.3]] * 60) == []
    slow = SlowRanks(parse_layout("pp2,mbs1"))
    grown = [one for step in range(60) for one in slow.after([0.1 * (1 + step // 30)] * 2, 8 * (1 + step // 30))]
    assert grown == []
    stalls = [[0.1, 0.1 if step % 5 else 3.0] for step in range(100)]
    assert named("dp2,mbs1", stalls) == []
    # all slower at once, and milliseconds that a scheduler takes
    assert named("pp2,mbs1", [[0.1, 0.1]] * 30 + [[0.3, 0.3]] * 30) == []
    assert named("dp2,mbs1", [[0.001, 0.003]] * 60) == []


def test_a_rank_that_was_fast_again_is_named_anew_and_the_sentence_has_its_numbers() -> None:
    even, late = [0.1, 0.1], [0.1, 0.1 * FACTOR * 1.2]
    assert [rank for _, rank in named("dp2,mbs1", ([even] * 40 + [late] * 40) * 2)] == [1, 1]
    slow = SlowRanks(parse_layout("dp2,mbs1"))
    (told,) = [one for _ in range(STEPS) for one in slow.after([0.1, 0.18], 8)]
    assert told.sentence == "1.8 times the others' median over 20 steps: 0.180 s of its own a step, 0.100 s are usual"
