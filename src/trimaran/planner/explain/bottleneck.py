"""Bottleneck: what a layout loses most time to, and what would have to change."""

from __future__ import annotations

from trimaran.cost.case import Case
from trimaran.cost.effects.time_effects import PARTS
from trimaran.cost.estimates import Estimate
from trimaran.cost.memory.parts import MEMORY_PARTS
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
    largest = max(MEMORY_PARTS, key=lambda part: float(getattr(fullest, part)))
    needs = f"stage {fullest.stage} needs {predicted.mem_gib:.1f} GiB, {largest} {getattr(fullest, largest):.1f} of it"
    free = f"{limit_gib:.1f} GiB (margin {margin:.0%} left free)"
    if predicted.mem_gib <= limit_gib:
        return f"{needs}, of {free}"
    return f"{needs}, but a rank may use {free}: lower it by {predicted.mem_gib - limit_gib:.1f} GiB"
