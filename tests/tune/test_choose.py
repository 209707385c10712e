"""The tuning finds the fastest layout in few trials, avoids what fails, and knows when to stop."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimaran.layout.layout import Layout
from trimaran.nouns.measurement import Measurement
from trimaran.study.tune.choose import Candidate, decide
from trimaran.study.tune.surrogate import believe

LAYOUTS = [
    Layout(dp=dp, tp=tp, pp=8 // (dp * tp), mbs=mbs)
    for dp in (1, 2, 4, 8)
    for tp in (1, 2, 4, 8)
    if 8 % (dp * tp) == 0
    for mbs in (1, 2, 4)
]


def true_seconds(layout: Layout) -> float:
    """A machine that the cost model misjudges: TP costs twice what is predicted."""
    return predicted_seconds(layout) * (1 + 0.15 * math.log2(layout.tp)) * 1.3


def predicted_seconds(layout: Layout) -> float:
    return 1.0 + 0.05 * math.log2(layout.tp) + 0.08 * (layout.pp - 1) / 8 + 0.1 * abs(math.log2(layout.mbs / 2))


def row(seconds: float | None) -> Measurement:
    """A row of these seconds, or of a layout that did not run."""
    stated = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 256, "mbs": 1, "gbs": 8}
    return Measurement.model_validate(stated | {"sec_per_it": seconds, "status": "ok" if seconds else "oom"})


def candidates() -> list[Candidate]:
    return [Candidate(layout, predicted_seconds(layout), 1.0) for layout in LAYOUTS]


def test_the_winner_is_found_in_few_trials_and_then_certain() -> None:
    known = candidates()
    for _ in range(len(LAYOUTS)):
        verdict = decide(known, prior_error=0.15, margin=0.02)
        if verdict.certain or verdict.next is None:
            break
        verdict.next.row = row(true_seconds(verdict.next.layout))
    best = min(true_seconds(layout) for layout in LAYOUTS)
    assert verdict.best is not None and true_seconds(verdict.best.layout) <= best * 1.02
    assert sum(candidate.row is not None for candidate in known) <= 8


def test_a_layout_that_fails_is_never_tried_again_and_all_failing_ends() -> None:
    known = candidates()
    tried = []
    while (verdict := decide(known, 0.15, 0.02)).next is not None:
        assert verdict.next not in tried
        verdict.next.row = row(None)
        tried.append(verdict.next)
    assert len(tried) == len(LAYOUTS) and verdict.best is None and not verdict.certain


def test_neighbours_of_a_failure_are_doubted() -> None:
    known = candidates()
    first = decide(known, 0.15, 0.02).next
    assert first is not None
    first.row = row(None)
    second = decide(known, 0.15, 0.02).next
    assert second is not None
    distance = sum(getattr(first.layout, n) != getattr(second.layout, n) for n in ("dp", "tp", "pp", "mbs"))
    assert distance >= 2


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=len(LAYOUTS)), st.floats(0.02, 0.5))
def test_a_measured_layout_is_believed_and_the_others_never_grow_less_certain(
    ratios: list[float], error: float
) -> None:
    predicted = [predicted_seconds(layout) for layout in LAYOUTS]
    measured = {index: predicted[index] * ratio for index, ratio in enumerate(ratios)}
    belief = believe(LAYOUTS, predicted, measured, error)
    assert np.all(belief.std <= error + 1e-9)
    assert np.all(np.isfinite(belief.mean))
    for index in measured:
        assert belief.std[index] <= 0.012


def test_one_measurement_moves_all_predictions_the_same_way() -> None:
    predicted = [predicted_seconds(layout) for layout in LAYOUTS]
    belief = believe(LAYOUTS, predicted, {0: predicted[0] * 1.5}, 0.2)
    assert np.all(belief.mean > np.log(predicted))
