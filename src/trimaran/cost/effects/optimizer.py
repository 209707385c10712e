"""Time of the optimizer step: bytes of states, weights and gradients over memory bandwidth."""

from __future__ import annotations

import numpy as np

from trimaran.cost.grid import DP_KINDS, Floats, LayoutGrid, by_precision
from trimaran.cost.memory import element_bytes, gradient_bytes
from trimaran.cost.operators.layer import Rates
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Optimizer

# Passes over the states that an optimizer made of separate kernels needs, against one that fuses them.
UNFUSED = 3.5


def accumulation_time(grid: LayoutGrid, stack: Stack, parameters: Floats | float, rate: Rates) -> Floats:
    """Seconds of adding one micro-batch's gradients of `parameters` weights to the sum of those before.

    The new gradients are read, the sum is read and written: however small the micro-batch, all weights are
    passed over once more. Where gradients are sharded after each micro-batch, a rank adds its own part.
    """
    sharded = (grid.zero_stage >= 2) | (grid.dp_kind == DP_KINDS.index("fully_sharded"))
    own = parameters / np.where(sharded, grid.dp, 1)
    moved = own * (element_bytes(grid) + 2.0 * gradient_bytes(grid, stack))
    return np.asarray(np.where(grid.micro_batches > 1, moved / rate.bandwidth * rate.memory_slowdown, 0.0))


def step_time(grid: LayoutGrid, stack: Stack, optimizer: Optimizer, parameters: Floats, rate: Rates) -> Floats:
    """Seconds of gradient norm, clipping and update on one rank.

    Adam reads and writes its two moments and the weights that it steps, the master copy where there is one (24 bytes
    in fp32, 12 in bf16 alone), reads the gradient and writes the working weights beside a master copy; SGD touches
    weights and gradient only. ZeRO divides it by DP.
    """
    gradient = gradient_bytes(grid, stack)
    moments = 4.0 if optimizer == "adam" else 0.0
    state_bytes = gradient + by_precision(
        grid.precision,
        lambda p: moments * p.moment_bytes + (8.0 + p.weight_bytes if p.master else 2.0 * p.weight_bytes),
    )
    if not stack.fused_optimizer:
        state_bytes = state_bytes * UNFUSED
    sharded = (grid.zero_stage >= 1) | (grid.dp_kind == DP_KINDS.index("fully_sharded"))
    own = parameters / np.where(sharded, grid.dp, 1)
    # The norm reads all gradients that the rank holds; clipping (and the fp16 scaler) reads and writes them.
    norm_bytes = np.where(grid.zero_stage >= 2, own, parameters) * gradient * 3.0
    return (own * state_bytes + norm_bytes) / rate.bandwidth * rate.memory_slowdown
