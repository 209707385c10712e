"""What a pipeline's rank repeats: cut out, and put in again as often as it comes, it is the whole schedule."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as some

from trimaran.layout.schedule import Action, actions
from trimaran.layout.steady import shortened
from trimaran.nouns.stack import FOLDED, Schedule

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev", "gpipe")


def in_flight(some_actions: tuple[Action, ...]) -> int:
    """The most forwards whose activations are kept at once."""
    kept, most = 0, 0
    for action in some_actions:
        kept += {"forward": 1, "backward": -1, "backward_input": -1}.get(action.kind, 0)
        most = max(most, kept)
    return most


@given(
    schedule=some.sampled_from(SCHEDULES),
    ranks=some.integers(1, 6),
    chunks=some.integers(1, 3),
    groups=some.integers(1, 12),
    data=some.data(),
)
def test_what_is_repeated_makes_the_whole_again(
    schedule: Schedule, ranks: int, chunks: int, groups: int, data: some.DataObject
) -> None:
    rank = data.draw(some.integers(0, ranks - 1))
    chunks = 2 if schedule in FOLDED else chunks if schedule == "interleaved" else 1
    micro_batches = groups * ranks
    few = shortened(schedule, rank, ranks, ranks * chunks, micro_batches)
    short = actions(schedule, rank, ranks, ranks * chunks, few.micro_batches)
    whole = actions(schedule, rank, ranks, ranks * chunks, micro_batches)
    period = short[few.begin : few.end]
    kinds = [(action.kind, action.stage) for action in short[: few.end] + few.more * period + short[few.end :]]
    assert kinds == [(action.kind, action.stage) for action in whole]
    assert in_flight(short) == in_flight(whole)
    ends = {0, few.micro_batches - 1} if few.more else set()
    assert not ends & {action.micro_batch for action in period if action.kind != "forward"}


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)])
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_thousands_of_micro_batches_are_a_few(schedule: Schedule, chunks: int, rank: int) -> None:
    few = shortened(schedule, rank, 8, 8 * chunks, 2048)
    assert few.micro_batches <= (10 if chunks == 1 else 32)
    per_period = Counter(action.kind for action in actions(schedule, rank, 8, 8 * chunks, 2048)[few.begin : few.end])
    assert set(per_period.values()) == {1 if chunks == 1 else 16}
