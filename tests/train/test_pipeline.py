from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from trimaran.layout.schedule import Action, actions, feeds
from trimaran.nouns.stack import Schedule

RANKS = st.integers(1, 9)
MICRO_BATCHES = st.integers(1, 40)


def pipelines(ranks: int, micro_batches: int, chunks: int = 3) -> Iterator[tuple[Schedule, int, int]]:
    """(Schedule, virtual stages, micro-batches) of each schedule, with a number of micro-batches that it takes."""
    yield "gpipe", ranks, micro_batches
    yield "1f1b", ranks, micro_batches
    yield "zero_bubble", ranks, max(micro_batches, ranks)
    yield "interleaved", ranks * chunks, ranks * -(-micro_batches // ranks)


def in_flight(todo: tuple[Action, ...]) -> int:
    most = now = 0
    for action in todo:
        now += {"forward": 1, "backward": -1}.get(action.kind, 0)
        most = max(most, now)
    return most


@given(ranks=RANKS, micro_batches=MICRO_BATCHES)
def test_every_micro_batch_goes_forward_once_and_then_backward_once(ranks: int, micro_batches: int) -> None:
    for schedule, stages, count in pipelines(ranks, micro_batches):
        for rank in range(ranks):
            todo = actions(schedule, rank, ranks, stages, count)
            place = {action: at for at, action in enumerate(todo)}
            kinds = 3 if schedule == "zero_bubble" else 2
            assert len(todo) == len(place) == kinds * count * (stages // ranks)
            for action, at in place.items():
                assert action.stage % ranks == rank
                if action.kind != "forward":
                    assert place[action._replace(kind="forward")] < at
                if action.kind == "backward_weight":
                    assert place[action._replace(kind="backward")] < at


@given(ranks=RANKS, micro_batches=MICRO_BATCHES)
def test_micro_batches_in_flight_are_bounded_as_the_cost_model_has_them(ranks: int, micro_batches: int) -> None:
    for schedule, stages, count in pipelines(ranks, micro_batches):
        for rank in range(ranks):
            most = in_flight(actions(schedule, rank, ranks, stages, count))
            chunks = stages // ranks
            interleaved = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1, count * chunks)
            one_by_one = min(ranks - rank, count)
            expected = {"gpipe": count, "1f1b": one_by_one, "zero_bubble": one_by_one, "interleaved": interleaved}
            assert most == expected[schedule]


@given(ranks=RANKS, micro_batches=MICRO_BATCHES)
def test_schedules_never_deadlock(ranks: int, micro_batches: int) -> None:
    """Every rank can go on until all are done, given that sends do not block and a pair of ranks is one queue."""
    for schedule, stages, count in pipelines(ranks, micro_batches):
        left = [list(actions(schedule, rank, ranks, stages, count)) for rank in range(ranks)]
        arrived: set[Action] = set()
        while any(left):
            moved = False
            for todo in left:
                while todo:
                    action = todo[0]
                    first = action.kind == "forward" and action.stage == 0
                    last = action.kind == "backward" and action.stage == stages - 1
                    if not (first or last or action.kind == "backward_weight" or action in arrived):
                        break
                    moved = True
                    if (fed := feeds(todo.pop(0), stages)) is not None:
                        arrived.add(fed)
            assert moved
