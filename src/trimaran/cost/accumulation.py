"""Adding one micro-batch's gradients to those before."""

from __future__ import annotations

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.cost.kernels import Rates
from trimaran.cost.states import GRADIENTS, element_bytes, gradient_bytes, shards


def accumulation_time(case: Case, grid: LayoutGrid, parameters: Floats | float, rate: Rates) -> Floats:
    """Seconds of adding one micro-batch's gradients of `parameters` weights to the sum of those before.

    The new gradients are read, the sum is read and written: however small the micro-batch, all weights are
    passed over once more. Where gradients are sharded after each micro-batch, a rank adds its own part.
    """
    moved = parameters / shards(grid, GRADIENTS) * (element_bytes(grid) + 2.0 * gradient_bytes(grid, case.stack))
    return np.asarray(np.where(grid.micro_batches > 1, moved / rate.bandwidth * rate.memory_slowdown, 0.0))
