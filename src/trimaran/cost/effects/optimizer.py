"""The optimizer step: bytes of states, weights and gradients over memory bandwidth."""

from __future__ import annotations

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import Effect, TimePart
from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.cost.kernels import Rates
from trimaran.cost.states import (
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    casts_on,
    expert_shards,
    gradient_bytes,
    shards,
    stepped_bytes,
)
from trimaran.layout.layout import Layout
from trimaran.operators.casts import weight_cast_bytes

# Passes over the states that an optimizer made of separate kernels needs, against one that fuses them.
UNFUSED = 3.5


def step_time(
    case: Case, grid: LayoutGrid, parameters: Floats, rate: Rates, of_experts: Floats | None = None
) -> Floats:
    """Seconds of gradient norm, clipping and update on one rank.

    ZeRO divides the update by DP, and what is `of_experts` by the replicas of their own group. Weights that are cast
    once an iteration are cast here. A buffer of whole gradients may be passed over besides: searched for what is not
    finite, scaled, cleared; norm and clipping are then of the rank's share.
    """
    gradient = gradient_bytes(grid, case.stack)
    state_bytes = (gradient + stepped_bytes(grid, case)) * (1.0 if case.stack.fused_optimizer else UNFUSED)
    stepped = parameters / shards(grid, OPTIMIZER)
    if of_experts is not None:
        stepped = stepped + of_experts * (1.0 / expert_shards(grid, OPTIMIZER) - 1.0 / shards(grid, OPTIMIZER))
    # The norm reads all gradients that the rank holds; clipping (and the fp16 scaler) reads and writes them.
    passes = float(case.stack.gradient_buffer_passes)
    normed = np.where(grid.zero_stage >= (OPTIMIZER if passes else GRADIENTS), stepped, parameters)
    norm_bytes = (normed * 3.0 + parameters * passes) * gradient
    cast_bytes = parameters * weight_cast_bytes(casts_on(case, grid.precision), case.stack)
    if case.stack.gathers_casts:
        cast_bytes = cast_bytes / shards(grid, WEIGHTS)
    # what lies on the host is stepped there
    on_host = grid.chose("offload", "optimizer", "weights")
    moved: Floats = np.where(on_host, 0.0, stepped * state_bytes) + norm_bytes + cast_bytes
    return rate.streamed(moved)


def _cause(layout: Layout, case: Case, micro_batches: int) -> str:
    shares = layout.zero_stage == 0 and layout.dp * layout.cp > 1 and max(case.stack.zero_stages) > 0
    return f"the step passes through all states; {'ZeRO or ' * shares}a larger global batch"


STEP = Effect(
    (TimePart("optimizer", "the optimizer's step", _cause),),
    lambda iteration: {
        "optimizer": step_time(
            iteration.case, iteration.grid, iteration.parameters, iteration.work.rate, iteration.expert_parameters
        )
    },
)
