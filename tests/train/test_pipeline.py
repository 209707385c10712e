from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimaran.train.pipeline import Action, gpipe, one_f_one_b

STAGES = st.integers(1, 12)
MICRO_BATCHES = st.integers(1, 40)


def in_flight(actions: list[Action]) -> int:
    most = now = 0
    for action in actions:
        now += 1 if action.kind == "forward" else -1
        most = max(most, now)
    return most


@given(stages=STAGES, micro_batches=MICRO_BATCHES)
def test_every_micro_batch_goes_forward_once_and_then_backward_once(stages: int, micro_batches: int) -> None:
    for schedule in (gpipe, one_f_one_b):
        for stage in range(stages):
            actions = schedule(stage, stages, micro_batches)
            for i in range(micro_batches):
                assert actions.index(Action("forward", i)) < actions.index(Action("backward", i))
            assert len(actions) == 2 * micro_batches


@given(stages=STAGES, micro_batches=MICRO_BATCHES)
def test_1f1b_keeps_at_most_the_stages_behind_it_in_flight(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        assert in_flight(one_f_one_b(stage, stages, micro_batches)) == min(stages - stage, micro_batches)
        assert in_flight(gpipe(stage, stages, micro_batches)) == micro_batches


@given(stages=STAGES, micro_batches=MICRO_BATCHES)
def test_schedules_never_deadlock(stages: int, micro_batches: int) -> None:
    """Every stage can go on until all are done, given that sends do not block."""
    for schedule in (gpipe, one_f_one_b):
        left = [schedule(stage, stages, micro_batches) for stage in range(stages)]
        done: set[tuple[int, Action]] = set()
        while any(left):
            moved = False
            for stage, actions in enumerate(left):
                if not actions:
                    continue
                needs = stage - 1 if actions[0].kind == "forward" else stage + 1
                if not 0 <= needs < stages or (needs, actions[0]) in done:
                    done.add((stage, actions.pop(0)))
                    moved = True
            assert moved
