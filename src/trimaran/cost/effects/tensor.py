"""Tensor parallelism: its collectives on activations, as far as a device does not wait for its host meanwhile."""

from __future__ import annotations

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import Effect, TimePart
from trimaran.layout.layout import Layout


def _cause(layout: Layout, case: Case, micro_batches: int) -> str:
    across = layout.tp * layout.stride("tp") > case.cluster.devices_per_node
    return f"TP {layout.tp} reduces activations {'across nodes' if across else 'inside the node'}; a smaller TP"


TENSOR = Effect(
    (TimePart("tp", "collectives of tensor parallelism", _cause),),
    lambda iteration: {"tp": iteration.micro_batches * iteration.work.tp_time},
)
