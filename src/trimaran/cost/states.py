"""States: bytes of weights, gradients and optimizer states, and over how many replicas ZeRO shards each."""

from __future__ import annotations

import numpy as np

from trimaran.cost.grid import Floats, LayoutGrid, by_precision
from trimaran.nouns.stack import Stack

# ZeRO stages from which each is sharded (Rajbhandari et al., arXiv 1910.02054, section 5).
OPTIMIZER, GRADIENTS, WEIGHTS = 1, 2, 3


def shards(grid: LayoutGrid, stage: int) -> Floats:
    """Over how many ranks a replica's state is cut that ZeRO shards from `stage` on; 1 where it is whole."""
    return np.where(grid.zero_stage >= stage, grid.shard, 1).astype(np.float64)


def element_bytes(grid: LayoutGrid) -> Floats:
    """Bytes of an activation or of a working weight."""
    return by_precision(grid.precision, lambda p: p.activation_bytes)


def gradient_bytes(grid: LayoutGrid, stack: Stack) -> Floats:
    """Bytes a gradient is kept in: its precision's, or those in which the stack accumulates it."""
    wide, wider = stack.wide_gradients, float(stack.grad_bytes_16bit)
    return by_precision(grid.precision, lambda p: wider if p.name in wide else p.gradient_bytes)


def sent_gradient_bytes(grid: LayoutGrid, stack: Stack) -> Floats:
    """Bytes a gradient travels in: those it is kept in, or the 16 bit that stay beside the accumulated ones.

    DeepSpeed, runtime/engine.py, communication_data_type: bf16 where training is in bf16.
    """
    low, wide = float(stack.low_gradient_bytes), stack.wide_gradients
    sent = by_precision(grid.precision, lambda p: low if p.name in wide else 0.0)
    return np.where(sent > 0, sent, gradient_bytes(grid, stack))
