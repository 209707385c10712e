"""What hides of a layer's exchanges of tokens: behind shared experts, or behind another micro-batch's layer."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.cost.layers.layer_work import LayerWork, Shapes
from trimaran.cost.network import crowded
from trimaran.cost.states import recomputed_share
from trimaran.nouns.recompute import modules_of
from trimaran.nouns.stack import Stack

SHARED = ("shared up", "shared activation", "shared down", "shared gate")


def behind_shared(grid: LayoutGrid, shapes: Shapes, layer: LayerWork) -> LayerWork:
    """The layer where shared experts run beside dispatch and combine.

    Their first product runs while tokens are sent and their second while they come back, forward and backward, and
    where the forward is made again (Megatron-Core 0.15, core/transformer/moe/shared_experts.py:
    linear_fc1_forward_and_act, linear_fc2_forward).
    """
    chosen = grid.chose("ep_overlap", "shared")
    if not chosen.any() or not shapes.part.model.shared_experts:
        return layer
    beside = [shapes.time(operator) for operator in shapes.layer("experts") if operator.name in SHARED]
    forward, backward = (reduce(np.add, phase) for phase in zip(*beside, strict=True))
    shown_forward, again = np.maximum(layer.ep_forward - forward, 0.0), _made_again(shapes.part.stack, grid)
    shown_backward = np.maximum(layer.ep_backward - again * layer.ep_forward - backward, 0.0) + again * shown_forward
    return replace(
        layer,
        ep_forward=np.where(chosen, shown_forward, layer.ep_forward),
        ep_backward=np.where(chosen, shown_backward, layer.ep_backward),
    )


def _made_again(stack: Stack, grid: LayoutGrid) -> Floats:
    """Share of a layer's exchanges that a recompute makes again, and shared experts with them."""
    again = recomputed_share(stack, grid)
    for word, members in grid.partial_recomputes():
        again[members] = float("moe" in modules_of(word))
    return again


def behind_other_batch(case: Case, grid: LayoutGrid, layer: LayerWork) -> LayerWork:
    """The layer where one micro-batch's forward runs beside another's backward, mean over an iteration's passes.

    What one exchanges hides behind what the other computes, as far as that lasts, less the multiprocessors that the
    exchange takes (Megatron-Core 0.15, core/pipeline_parallel/combined_1f1b.py; torchtitan 0.2.2,
    distributed/dual_pipe_v.py). As a pipeline fills and drains there is no other: 2 (p - 1) + (v - 1) p + 1 of a rank's
    m v forwards are alone, and under DualPipeV 3 p - 1 of the first rank's 2 m (trimaran.layout.schedule).
    """
    chosen = grid.chose("ep_overlap", "batch")
    exchanged = np.asarray(layer.ep)
    if not chosen.any() or not exchanged.any():
        return layer
    computed = layer.once + layer.recompute + layer.tp + layer.cp
    passes = grid.micro_batches * grid.vpp
    alone = np.where(grid.pp > 1, 2.0 * (grid.pp - 1) + (grid.vpp - 1.0) * grid.pp + 1.0, 1.0)
    alone = np.where(grid.chose("schedule", "dualpipev"), 3.0 * grid.pp - 1.0, alone)
    paired = np.maximum(1.0 - alone / passes, 0.0) * chosen
    hidden = np.minimum(exchanged, computed) * paired * (1.0 - crowded(case.cluster))
    shown = 1.0 - hidden / np.maximum(exchanged, 1e-30)
    return replace(layer, ep_forward=layer.ep_forward * shown, ep_backward=layer.ep_backward * shown)
