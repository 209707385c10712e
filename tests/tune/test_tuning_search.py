"""The search measures what it was told first, honours its limits, and survives failures."""

from __future__ import annotations

from trimaran.layout import Layout
from trimaran.tune.choose import Candidate
from trimaran.tune.search import search

CANDIDATES = [Candidate(Layout(dp=dp, mbs=mbs), 1.0 + 0.1 * i, 1.0) for i, (dp, mbs) in enumerate(
    (dp, mbs) for dp in (1, 2, 4) for mbs in (1, 2, 4)
)]  # fmt: skip


def test_stated_layouts_come_first_and_min_trials_are_made() -> None:
    found = search(CANDIDATES, lambda i: 1.0 + 0.1 * i, first=[8, 7], min_trials=5, prior_error=0.01)
    assert found.order[:2] == (8, 7) and len(found.order) >= 5
    assert found.best == 0


def test_max_trials_bound_the_search() -> None:
    found = search(CANDIDATES, lambda i: 1.0, max_trials=3, prior_error=0.5)
    assert len(found.order) == 3


def test_failures_are_kept_and_the_best_of_the_rest_wins() -> None:
    found = search(CANDIDATES, lambda i: None if i < 3 else float(i), prior_error=0.1)
    assert found.best == 3 and found.failed <= {0, 1, 2}


def test_when_everything_fails_there_is_no_winner() -> None:
    found = search(CANDIDATES, lambda i: None)
    assert found.best is None and len(found.order) == len(CANDIDATES) and not found.verdict.certain
