"""Estimate: predicted memory and time, in named parts, of one layout or of a whole grid.

One formula serves both: `estimate` is `estimate_many` on a grid of one, and tests hold them equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import IterationCost
from trimaran.cost.effects.overhead import overhead_time
from trimaran.cost.effects.time_effects import TIME_PARTS, time_parts
from trimaran.cost.estimates import Estimate, Estimates, MemoryParts, TimeParts
from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.cost.memory.limit import memory_limit_gib
from trimaran.cost.memory.parts import MEMORY_PARTS, stage_memory
from trimaran.cost.memory.rank_memory import GIB, OnEveryStage
from trimaran.cost.memory.stage import (
    StageLayers,
    dense_of_stages,
    end_shapes,
    further_ranks,
    shape_between,
)
from trimaran.cost.pipeline.closed_form import pipeline_runs, silent_time
from trimaran.cost.pipeline.lockstep import play
from trimaran.cost.placed.placed_estimate import placed_estimate
from trimaran.cost.placed.topology import differs
from trimaran.cost.similar import time_scales
from trimaran.cost.stage_work import stage_work
from trimaran.layout.layout import Layout

# Layouts evaluated at once: intermediate arrays then stay in the processor's cache.
CHUNK = 16384


def estimate(case: Case, layout: Layout, *, simulate: bool = False) -> Estimate:
    """Predict one layout, its ranks where it places them, or on the devices in their order.

    With `simulate` its pipeline is played, as it is anyway where nodes or links differ. Nothing is validated:
    check_layout of trimaran.layout.rules does that.
    """
    grid = LayoutGrid.from_layouts([layout], case.workload, case.stack)
    as_one = estimate_each(case, grid, simulate=simulate)[0]
    return placed_estimate(case, layout, as_one) if layout.placed or differs(case.cluster) else as_one


def estimate_each(case: Case, grid: LayoutGrid, *, simulate: bool = False) -> list[Estimate]:
    """An Estimate of every layout of the grid; with `simulate` their pipelines are played, as in simulated_many."""
    many = estimate_many(case, grid)
    return each_of(case, grid, simulated_many(case, grid, many) if simulate else many)


def each_of(case: Case, grid: LayoutGrid, many: Estimates) -> list[Estimate]:
    """What was predicted for the grid as an Estimate of every layout."""
    memory, origin = memory_per_stage(case, grid), case.origin
    time = [many.parts[name].tolist() for name in TIME_PARTS]
    # of the ranks themselves, where the search looks at the ends and the fullest between
    fullest = np.array([max(stage.total for stage in stages) for stages in memory])
    fits = fullest <= memory_limit_gib(case.cluster, grid.devices)
    totals = [each.tolist() for each in (many.sec_per_it, fullest, many.reported_mem_gib, fits)]
    return [
        Estimate(
            sec_per_it=seconds,
            time=TimeParts(**dict(zip(TIME_PARTS, parts, strict=True))),
            mem_gib=mem_gib,
            reported_mem_gib=reported,
            memory=stages,
            fits=fits,
            stage_split=grid.splits.splits[split].layers,
            micro_batches=micro_batches,
            calibrated_by=origin,
            time_error=case.calibration.time_error,
            mem_error=case.calibration.mem_error,
        )
        for seconds, mem_gib, reported, fits, parts, stages, split, micro_batches in zip(
            *totals, zip(*time, strict=True), memory, grid.split_row.tolist(), grid.micro_batches.tolist(), strict=True
        )
    ]


def estimate_many(case: Case, grid: LayoutGrid) -> Estimates:
    """Predict every layout of the grid, in the grid's order."""
    return Estimates.join([_estimates(case, chunk) for chunk in _chunks(grid)])


def simulated_many(case: Case, grid: LayoutGrid, closed: Estimates) -> Estimates:
    """The closed form's predictions of the grid with what waits in the pipeline (sends and bubble) simulated."""
    times = stage_work(case, grid).times
    played = play(pipeline_runs(grid, times)) * time_scales(case, grid)
    busy = reduce(
        np.add, (closed.parts[name] for name in ("forward", "backward", "recompute", "head", "tp", "ep", "cp"))
    )
    waits = np.where(grid.pp > 1, np.maximum(played - busy, 0.0), 0.0)
    # Stages that share cores take longer while all of them work, of which the closed form knows and a player does not.
    waits = np.where(times.crowding > 1.0, np.maximum(waits, closed.parts["pp"] + closed.parts["bubble"]), waits)
    sends = np.minimum(closed.parts["pp"], waits)
    parts = {**closed.parts, "pp": sends, "bubble": waits - sends}
    return replace(closed, parts=parts, sec_per_it=_added(parts))


def memory_per_stage(case: Case, grid: LayoutGrid) -> list[tuple[MemoryParts, ...]]:
    """Memory of a rank of each pipeline stage, first to last, of every layout of the grid."""
    rows = np.repeat(np.arange(len(grid)), grid.pp)
    stages = np.arange(len(rows)) - np.repeat(np.cumsum(grid.pp) - grid.pp, grid.pp)
    layers = grid.splits.layers(grid.split_row).sum(axis=1)[rows, stages]
    each = grid.take(rows)
    head = stages == np.where(each.folded, 0, each.pp - 1)
    held = layers + case.model.mtp_depth * head
    dense = dense_of_stages(case.model, grid)[rows, stages] if len(case.model.kinds) > 1 else 0.0
    shape = StageLayers(held * 1.0, stages == 0, head, dense).at_work(each, stages * 1.0)
    memory = stage_memory(case, each, shape)
    columns = zip(*((memory.parts[name] / GIB).tolist() for name in MEMORY_PARTS), strict=True)
    # Made unchecked: hundreds of stages, and figures of the model's own.
    all_stages = [
        MemoryParts.model_construct(stage=stage, layers=n, **dict(zip(MEMORY_PARTS, parts, strict=True)))
        for stage, n, parts in zip(stages.tolist(), layers.tolist(), columns, strict=True)
    ]
    ends = np.cumsum(grid.pp).tolist()
    return [tuple(all_stages[end - pp : end]) for end, pp in zip(ends, grid.pp.tolist(), strict=True)]


def time_many(case: Case, grid: LayoutGrid) -> Floats:
    """Seconds per iteration alone, shape (n,)."""
    return np.concatenate([_added(time_parts(IterationCost(case, chunk, apart=False))) for chunk in _chunks(grid)])


def busy_many(case: Case, grid: LayoutGrid) -> Floats:
    """Seconds in which the slowest stage computes and reduces over TP, recomputation apart, shape (n,)."""
    work = stage_work(case, grid)
    once = work.of_layers("once") + work.ends + work.tp_time + work.ep_time + work.cp_time
    return np.asarray(grid.micro_batches * once * time_scales(case, grid))


def stages_many(case: Case, grid: LayoutGrid) -> Floats:
    """Seconds per iteration that the pipeline takes on links between its stages without delay, shape (n,).

    Less than the whole by sends, data parallelism and the optimizer's step.
    """
    silent = silent_time(grid, stage_work(case, grid).times) + overhead_time(case, grid)
    return np.asarray(silent * time_scales(case, grid))


def memory_many(case: Case, grid: LayoutGrid) -> tuple[Floats, Floats]:
    """GiB of the fullest rank: all of it, and as the stack's own tool reports it; shape (n,) each."""
    every = OnEveryStage(case, grid)
    stages = [stage_memory(case, grid, shape, every) for shape in end_shapes(case.model, grid)]
    totals = [stage.total / GIB for stage in stages]
    between = np.where(grid.pp > 2, totals[1], 0.0)  # of two stages, none is between them
    fullest = np.maximum(np.maximum(totals[0], between), totals[2])
    for rows, rank in further_ranks(case.model, grid):
        some = grid.take(rows)
        held = stage_memory(case, some, shape_between(case.model, some, rank)).total / GIB
        fullest[rows] = np.maximum(fullest[rows], held)
    report = case.stack.memory_report
    if report == "resident":
        return fullest, fullest
    # A log or nvidia-smi shows the node of rank 0, which holds the first stage.
    if report == "node_used":
        return fullest, totals[0] * np.minimum(grid.devices, case.cluster.devices_per_node)
    return fullest, totals[0] if report == "device_used" else stages[0].allocated / GIB


def _chunks(grid: LayoutGrid) -> Iterator[LayoutGrid]:
    return (grid.take(slice(start, start + CHUNK)) for start in range(0, max(len(grid), 1), CHUNK))


def _estimates(case: Case, grid: LayoutGrid) -> Estimates:
    parts = time_parts(IterationCost(case, grid))
    memory, reported = memory_many(case, grid)
    fits = memory <= memory_limit_gib(case.cluster, grid.devices)
    return Estimates(parts, sec_per_it=_added(parts), mem_gib=memory, reported_mem_gib=reported, fits=fits)


def _added(parts: dict[str, Floats]) -> Floats:
    """Sum in the parts' order: NumPy's own sum adds one layout and many in different orders."""
    return reduce(np.add, parts.values())
