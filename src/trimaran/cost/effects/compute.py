"""Compute on the slowest stage: forward and backward, what recompute adds, embedding and head."""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import Effect, IterationCost, TimePart
from trimaran.cost.grid import Floats
from trimaran.layout.layout import Layout


def _seconds(iteration: IterationCost) -> Mapping[str, Floats]:
    m, work = iteration.micro_batches, iteration.work
    return {
        "forward": work.of_layers("forward", m),
        "backward": work.of_layers("backward", m),
        "recompute": work.of_layers("recompute", m),
        "head": m * work.ends,
    }


def _recompute_cause(layout: Layout, case: Case, micro_batches: int) -> str:
    smaller = "a smaller micro-batch" if layout.mbs > 1 else "more ranks to share a layer or a sequence"
    return f"activations are computed twice to save memory; more memory or {smaller}"


def _head_cause(layout: Layout, case: Case, micro_batches: int) -> str:
    if layout.pp == 1:
        return f"embedding, logits and loss over {case.model.vocab} words; more TP shares them out"
    return f"the logits over {case.model.vocab} words sit on the slowest stage; fewer layers there, more TP"


COMPUTE = Effect(
    (
        TimePart("forward", "layers, forward"),
        TimePart("backward", "layers, backward"),
        TimePart("recompute", "activations computed again", _recompute_cause),
        TimePart("head", "embedding, logits and loss", _head_cause),
    ),
    _seconds,
)
