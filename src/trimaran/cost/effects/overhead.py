"""What every micro-batch and every iteration cost besides: launches, data, logging, agreement."""

from __future__ import annotations

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import Effect, TimePart
from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.cost.network import Network, group
from trimaran.layout.layout import Layout

# Bytes of loss, gradient norm, zeros and stop signal.
AGREED_BYTES = 32.0


def overhead_time(case: Case, grid: LayoutGrid) -> Floats:
    """Seconds that every micro-batch and every iteration cost besides.

    The host goes through its schedule, sends and hooks once for each virtual stage of a rank (Megatron-Core 0.15,
    core/pipeline_parallel/schedules.py, forward_step_helper and backward_step_helper, lines 1200 and 1273). A GPU's
    does so ahead of it where nothing of a virtual stage waits for the device: neither sends (the same,
    p2p_communication.py, lines 395 to 398, which batched ones do) nor experts' numbers of tokens
    (core/transformer/moe/token_dispatcher.py, _maybe_dtoh_and_synchronize).
    """
    calibration = case.calibration
    waits = grid.chose("schedule", *case.stack.blocking_schedules) | (case.cluster.device.kind == "cpu")
    waits = waits | bool(case.model.experts)
    passes = grid.micro_batches * np.where(waits, grid.vpp, 1)
    fixed = passes * calibration.micro_batch_ms * 1e-3 + calibration.iteration_ms * 1e-3
    return np.asarray(fixed + _agreement(case, grid))


def _agreement(case: Case, grid: LayoutGrid) -> Floats:
    """Seconds in which the ranks agree on loss and gradient norm, where that crosses a shaped network."""
    if case.cluster.shaped is None or not case.stack.agrees_every_step:
        return np.zeros(len(grid))
    everyone = group(grid.devices, np.ones_like(grid.devices), grid.devices, case.cluster)
    network = Network(case.cluster, case.calibration)
    return np.where(everyone.crosses, network.all_reduce(np.full(len(grid), AGREED_BYTES), everyone), 0.0)


def _cause(layout: Layout, case: Case, micro_batches: int) -> str:
    if micro_batches > 1:
        return f"{micro_batches} micro-batches each cost launches; a larger micro-batch"
    return "launches and the loop itself; a larger batch or model"


OVERHEAD = Effect(
    (TimePart("overhead", "launches, data, logging", _cause),),
    lambda iteration: {"overhead": overhead_time(iteration.case, iteration.grid)},
)
