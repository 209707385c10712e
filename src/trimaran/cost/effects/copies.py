"""Copies: time in which ranks that own the same weights sum gradients, or what they learned apart."""

from __future__ import annotations

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import IterationCost
from trimaran.cost.effects.low_rank import FACTORED, sent_share
from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.cost.network import crowded, expert_group
from trimaran.cost.states import OPTIMIZER, expert_shards, shards
from trimaran.layout.compression import FORMATS

# Bytes that the operators of `begin_compressed_sum` (train/engine/copy_sums.py) read and write of each number: adding
# to what was not sent, 12, room for whole blocks, 8, packing, 35, what is kept of that, 27, unpacking and adding up
# what comes, 19, unpacking the sum, 15, putting it in place, 16; and packing and keeping of a rank's part of the sum.
_CODED, _CODED_OF_PART = 132.0, 74.0
# Of each number that an outer optimizer steps: the difference to where the round began, 20, SGD with its momentum, 24,
# and the copy of what it makes, 8.
_OUTER_STEP = 52.0


def between_copies(case: Case, grid: LayoutGrid, gradient: Floats) -> Floats:
    """Bytes of a number between copies of it: `gradient`, those it has otherwise, or those of the compression."""
    for word, sent_as in FORMATS.items():
        gradient = np.where(grid.chose("compression", word), sent_as.sent_bytes, gradient)
    factored = grid.chose("compression", "powersgd")
    return np.where(factored, 4.0 * sent_share(case, grid), gradient) if factored.any() else gradient


def sharded_copies(iteration: IterationCost, gradient: Floats, of_experts: Floats | None = None) -> Floats | float:
    """Seconds in which ranks that hold the same shards sum theirs of `gradient` bytes: hybrid sharding's.

    `of_experts` are those of routed experts besides, which ranks of their own share out.
    """
    grid = iteration.grid
    if not grid.shard.any():
        return 0.0
    summed = _all_reduce(iteration, gradient)
    if of_experts is not None:
        between = expert_group(grid, iteration.network.cluster, "ereplicate")
        shard = of_experts / expert_shards(grid, OPTIMIZER)
        summed = summed + iteration.network.all_reduce(shard, between)
    return np.where(grid.zero_stage > 0, summed, 0.0)


def coding_time(iteration: IterationCost) -> Floats | float:
    """Seconds in which an iteration's sums between copies are compressed, and what comes back is put in place."""
    grid, rate = iteration.grid, iteration.work.rate
    if not grid.compression.any():
        return 0.0
    owned = iteration.parameters / shards(grid, OPTIMIZER)
    moved = owned * (_CODED + _CODED_OF_PART / grid.size("replicate"))
    moved = np.where(grid.chose("compression", "powersgd"), owned * FACTORED, moved)
    return np.where(grid.compression > 0, rate.streamed(moved) / _each(grid), 0.0)


def outer_time(iteration: IterationCost) -> Floats | float:
    """Seconds of an iteration's part of a round: what replicas learned is summed in fp32, and stepped.

    Nothing is computed beside it (DiLoCo: Douillard et al., arXiv 2311.08105), unless the sum of each fragment has
    steps of delay to be there (streaming: arXiv 2501.18512): it then shows as far as it is longer than these compute.
    """
    grid, rate = iteration.grid, iteration.work.rate
    if not grid.local_steps.any():
        return 0.0
    number = between_copies(iteration.case, grid, np.full(len(grid), 4.0))
    step = rate.streamed(iteration.parameters / shards(grid, OPTIMIZER) * _OUTER_STEP)
    fragment = _all_reduce(iteration, number * iteration.parameters / grid.fragments)
    shown = fragment - _beside_steps(iteration, fragment)
    return np.where(grid.local_steps > 0, (shown * grid.fragments + step) / _each(grid), 0.0)


def _beside_steps(iteration: IterationCost, fragment: Floats) -> Floats | float:
    """Seconds of a fragment's sum that go by beside the steps that it may take."""
    case, grid, work = iteration.case, iteration.grid, iteration.work
    if not grid.outer_delay.any():
        return 0.0
    # the second half of a compressed sum begins when its first has come
    beside = fragment * np.where(grid.compression > 0, 0.5, 1.0)
    if case.cluster.device.kind == "cpu":  # ranks that share memory sum at once
        beside = beside * iteration.group_along("replicate").crosses
    computed = iteration.micro_batches * (work.of_layers("forward") + work.of_layers("backward") + work.ends)
    return np.minimum(beside, grid.outer_delay * computed) * (1.0 - crowded(case.cluster))


def _all_reduce(iteration: IterationCost, size: Floats) -> Floats:
    """Seconds of a sum over copies, of `size` bytes of all shards together."""
    between = iteration.group_along("replicate")
    return iteration.network.all_reduce(size / shards(iteration.grid, OPTIMIZER), between)


def _each(grid: LayoutGrid) -> Floats:
    """Steps between sums of copies."""
    return np.maximum(grid.local_steps, 1) * 1.0
