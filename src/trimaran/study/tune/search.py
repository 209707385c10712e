"""Search: measure candidates one by one until the fastest is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trimaran.study.tune.choose import Candidate, Verdict, decide
from trimaran.study.tune.surrogate import NOISE_STD


@dataclass(frozen=True)
class Outlook:
    """The candidates as the cost model sees them now, and its relative error (1 sigma)."""

    candidates: Sequence[Candidate]
    error: float


@dataclass(frozen=True)
class Found:
    """How a search ended. Indices are into the candidates; `order` is what was measured, `seconds` of all that ran."""

    best: int | None
    order: tuple[int, ...]
    seconds: dict[int, float]
    failed: frozenset[int]
    verdict: Verdict


def search(
    candidates: Sequence[Candidate],
    measure: Callable[[int], float | None],
    *,
    first: Sequence[int] = (),
    min_trials: int = 1,
    max_trials: int = 24,
    prior_error: float = 0.2,
    margin: float = 0.02,
    evidence: Mapping[int, float | None] | None = None,
    noise: Callable[[int], float] = lambda index: NOISE_STD,
    learn: Callable[[Mapping[int, float]], Outlook] | None = None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> Found:
    """Measure `first`, then whatever promises the largest gain, until the winner is certain.

    `measure` runs one candidate and returns its seconds per iteration, or None when it failed. `evidence` are
    results from before, as `measure` would return them: known, and counted in no limit. `noise` is the relative
    error (1 sigma) of a candidate's measured seconds. `learn` may predict all candidates anew from what was
    measured (same candidates, same order).
    The search ends when the winner is certain to `margin` and `min_trials` were made, when
    `max_trials` were made, or when nothing is left.
    """
    seconds: dict[int, float] = {}
    failed: set[int] = set()
    order: list[int] = []

    def note(index: int, result: float | None) -> None:
        if result is None:
            failed.add(index)
        else:
            seconds[index] = result

    def run(index: int) -> None:
        order.append(index)
        note(index, measure(index))

    for index, result in (evidence or {}).items():
        note(index, result)
    for index in dict.fromkeys(first):
        if len(order) < max_trials:
            run(index)
    while True:
        outlook = learn(seconds) if learn and seconds else Outlook(candidates, prior_error)
        noises = {index: noise(index) for index in seconds}
        verdict = decide(outlook.candidates, seconds, failed, outlook.error, margin, noises)
        on_verdict(verdict)
        enough = verdict.certain and len(order) >= min_trials
        if enough or verdict.next is None or len(order) >= max_trials:
            return Found(verdict.best, tuple(order), seconds, frozenset(failed), verdict)
        run(verdict.next)
