"""Search: measure candidates one by one until the fastest is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimaran.study.tune.choose import Candidate, Verdict, decide


@dataclass(frozen=True)
class SearchResult:
    """How a search ended: what was tried, in the order in which it came to be known, and the last verdict."""

    tried: tuple[Candidate, ...]
    verdict: Verdict


def search(
    candidates: Sequence[Candidate],
    measure: Callable[[Candidate], None],
    *,
    min_trials: int = 1,
    max_trials: int = 24,
    prior_error: float = 0.2,
    margin: float = 0.02,
    learn: Callable[[Sequence[Candidate]], float] | None = None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> SearchResult:
    """Measure the stated candidates, then whatever promises the largest gain, until the winner is certain.

    `measure` runs one candidate and notes its row; candidates that have a row at the beginning are known, and counted
    in no limit. `learn` may predict all candidates anew from those tried so far, and returns the relative error
    (1 sigma) of the predictions; without it that is `prior_error`.
    The search ends when the winner is certain to `margin` and `min_trials` were made, when
    `max_trials` were made, or when nothing is left.
    """
    tried = [candidate for candidate in candidates if candidate.row is not None]
    known_before = len(tried)
    stated = sorted(
        (candidate for candidate in candidates if candidate.stated),
        key=lambda candidate: candidate.predicted_sec_per_it,
    )
    for candidate in stated[:max_trials]:
        measure(candidate)
        tried.append(candidate)
    while True:
        error = learn(tried) if learn else prior_error
        verdict = decide(candidates, error, margin)
        on_verdict(verdict)
        trials = len(tried) - known_before
        enough = verdict.certain and trials >= min_trials
        if enough or verdict.next is None or trials >= max_trials:
            return SearchResult(tuple(tried), verdict)
        measure(verdict.next)
        tried.append(verdict.next)
