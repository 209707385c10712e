"""Bottleneck: what a layout loses most time to, and what would have to change."""

from __future__ import annotations

from trimaran.cost.case import Case
from trimaran.cost.effects.time_effects import PARTS
from trimaran.cost.estimates import Estimate, MemoryParts
from trimaran.cost.memory.parts import MEMORY_PARTS
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.cost.placed.placed_estimate import stage_limits
from trimaran.layout.layout import Layout

# Where no loss takes this share of an iteration, the matrix products themselves are the bottleneck.
_SMALL = 0.05


def bottleneck(layout: Layout, case: Case, predicted: Estimate) -> str:
    """One sentence: the largest loss of time, its share, where it comes from and what would lessen it."""
    losses = {part.name: part.cause for part in PARTS if part.cause is not None}
    name = max(losses, key=lambda part: float(getattr(predicted.time, part)))
    share = getattr(predicted.time, name) / predicted.sec_per_it
    if share < _SMALL:
        useful = (predicted.time.forward + predicted.time.backward) / predicted.sec_per_it
        return f"compute {useful:.0%}: forward and backward themselves; only a faster device or more of them helps"
    return f"{name} {share:.0%}: {losses[name](layout, case, predicted.micro_batches)}"


def memory_sentence(predicted: Estimate, limit_gib: float, margin: float) -> str:
    """Why a layout does not fit (or that it does): the fullest stage, its largest part and the limit."""
    fullest = max(predicted.memory, key=lambda stage: stage.total)
    return _told(fullest, predicted.mem_gib, limit_gib, margin, "")


def placed_memory_sentence(case: Case, layout: Layout, predicted: Estimate, margin: float) -> str:
    """The same where nodes differ: of the stage that has least left where it stands, and the group of those nodes."""
    limits = stage_limits(PlacedCost(case, layout), margin)
    stages = zip(predicted.memory, limits, strict=True)
    tightest, limit = max(stages, key=lambda one: one[0].total / one[1].gib)
    return _told(tightest, tightest.total, limit.gib, margin, f" on {limit.group}")


def _told(stage: MemoryParts, needed_gib: float, limit_gib: float, margin: float, where: str) -> str:
    largest = max(MEMORY_PARTS, key=lambda part: float(getattr(stage, part)))
    too_much_gib = needed_gib - limit_gib
    digits = _digits(needed_gib, limit_gib) if too_much_gib > 0 else 1
    needs = f"stage {stage.stage} needs {needed_gib:.{digits}f} GiB, {largest} {getattr(stage, largest):.1f} of it"
    free = f"{limit_gib:.{digits}f} GiB{where} (margin {margin:.0%} left free)"
    if too_much_gib <= 0:
        return f"{needs}, of {free}"
    return f"{needs}, but a rank may use {free}: lower it by {too_much_gib:.{digits}f} GiB"


def _digits(one: float, other: float) -> int:
    """Digits behind the point, at most six, by which two numbers and their difference from none are told apart."""
    return next((n for n in range(1, 6) if round(one, n) != round(other, n) and round(one - other, n)), 6)
