"""Adding one micro-batch's gradients to those before."""

from __future__ import annotations

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Bools, Floats, LayoutGrid
from trimaran.cost.kernels import Rates
from trimaran.cost.states import element_bytes, gradient_bytes


def accumulation_time(case: Case, grid: LayoutGrid, added: Floats, rate: Rates, made: Floats) -> Floats:
    """Seconds of adding one micro-batch's gradients to the sum of those before, so many as are `added` on a rank.

    The new gradients are read, the sum is read and written: however small the micro-batch, all weights are
    passed over once more. Where gradients are sharded after each micro-batch, a rank adds its own part. Where the
    product that makes them adds them too, only the sum passes, and beside that product: it shows where it is longer
    than the seconds for which they are `made`.
    """
    kept, element, fused = gradient_bytes(grid, case.stack), element_bytes(grid), is_fused(case, grid)
    seconds = rate.streamed(added * (2.0 * kept + np.where(fused, 0.0, element)))
    shown = np.where(fused, np.maximum(seconds - made, 0.0), seconds)
    return np.asarray(np.where(grid.micro_batches > 1, shown, 0.0))


def is_fused(case: Case, grid: LayoutGrid) -> Bools:
    """Where the product that makes a gradient adds it to the sum, so that the host launches nothing for that."""
    alike = gradient_bytes(grid, case.stack) == element_bytes(grid)
    never, always = (case.stack.fused_accumulation == word for word in ("never", "always"))
    return np.asarray((alike | always) & (not never))
