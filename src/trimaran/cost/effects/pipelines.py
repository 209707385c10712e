"""Waiting in the pipeline: for sends, and for the stages to fill and drain."""

from __future__ import annotations

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import Effect, TimePart
from trimaran.layout.layout import Layout


def _sends_cause(layout: Layout, case: Case, micro_batches: int) -> str:
    return f"{layout.pp} stages wait for sends; a faster network between them, or fewer stages"


def _bubble_cause(layout: Layout, case: Case, micro_batches: int) -> str:
    return (
        f"{layout.pp} stages fill and drain over {micro_batches} micro-batches; more of them (a larger global batch, a "
        f"smaller DP x micro-batch), fewer stages, or a better split"
    )


PIPELINE = Effect(
    (
        TimePart("pp", "waiting for sends between stages", _sends_cause),
        TimePart("bubble", "stages that idle", _bubble_cause),
    ),
    lambda iteration: {"pp": iteration.pipeline.sends, "bubble": iteration.pipeline.bubble},
)
