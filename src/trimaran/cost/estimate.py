"""Estimate: predicted memory and time, in named parts, of one layout or of a whole grid.

One formula serves both: `estimate` is `estimate_many` on a grid of one, and tests hold them equal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Self

import numpy as np

from trimaran.cost.calibration import Calibration, resolve_calibration
from trimaran.cost.effects.data_parallel import exposed_time
from trimaran.cost.effects.optimizer import step_time
from trimaran.cost.grid import Bools, Floats, Ints, LayoutGrid, padded_vocab_of
from trimaran.cost.memory import (
    GIB,
    StageMemory,
    StageShape,
    in_flight,
    memory_limit_gib,
    parameters,
    stage_memory,
)
from trimaran.cost.network import Network, group
from trimaran.cost.pipeline.closed_form import pipeline_runs, pipeline_time, silent_time
from trimaran.cost.pipeline.lockstep import play
from trimaran.cost.stage_work import stage_work
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import Noun
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

# Layouts evaluated at once: intermediate arrays then stay in the processor's cache.
CHUNK = 16384


@dataclass(frozen=True)
class Estimates:
    """Predictions for a grid of n layouts: arrays of shape (n,).

    The time parts, seconds exposed along the slowest stage, add up to `sec_per_it`; `mem_gib` is the
    largest over the ranks, `reported_mem_gib` what the stack's own tool would print.
    """

    forward: Floats
    backward: Floats
    recompute: Floats
    head: Floats
    tp: Floats
    pp: Floats
    bubble: Floats
    dp: Floats
    optimizer: Floats
    overhead: Floats
    sec_per_it: Floats
    mem_gib: Floats
    reported_mem_gib: Floats
    fits: Bools

    @classmethod
    def join(cls, parts: list[Self]) -> Self:
        """One from several, in order."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    def take(self, index: Ints | slice) -> Self:
        """Those of the layouts at `index`."""
        return type(self)(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


class TimeParts(Noun):
    """Seconds of one iteration by cause, exposed along the slowest stage; they add up to sec_per_it."""

    forward: float
    backward: float
    recompute: float
    head: float
    tp: float
    pp: float
    bubble: float
    dp: float
    optimizer: float
    overhead: float


class MemoryParts(Noun):
    """GiB on a rank of one pipeline stage, by cause."""

    stage: int
    layers: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    context: float

    @property
    def total(self) -> float:
        """All of it, GiB."""
        return float(sum(getattr(self, name) for name in MEMORY_PARTS))


TIME_PARTS: tuple[str, ...] = tuple(TimeParts.model_fields)
MEMORY_PARTS: tuple[str, ...] = tuple(f.name for f in fields(StageMemory))


class Estimate(Noun):
    """What the cost model predicts for one layout.

    `calibrated_by` says whether a fit or the prior stands behind it; `time_error` and `mem_error` are the
    relative errors (1 sigma) that the calibration showed on rows it had not seen.
    """

    sec_per_it: float
    time: TimeParts
    mem_gib: float
    reported_mem_gib: float
    memory: tuple[MemoryParts, ...]
    fits: bool
    stage_split: tuple[int, ...]
    micro_batches: int
    calibrated_by: str
    time_error: float
    mem_error: float


def estimate(
    workload: Workload, cluster: Cluster, stack: Stack, layout: Layout, calibration: Calibration | None = None
) -> Estimate:
    """Predict one layout. Nothing is validated: check_layout of trimaran.layout.layout does that.

    Without `calibration` the shipped one of (cluster, stack) applies, and without that the prior.
    """
    return estimate_each(workload, cluster, stack, LayoutGrid.from_layouts([layout], workload, stack), calibration)[0]


def estimate_each(
    workload: Workload,
    cluster: Cluster,
    stack: Stack,
    grid: LayoutGrid,
    calibration: Calibration | None = None,
    *,
    simulate: bool = False,
) -> list[Estimate]:
    """An Estimate of every layout of the grid; with `simulate` their pipelines are played, as in simulated_many."""
    known = resolve_calibration(cluster, stack, calibration)
    many = estimate_many(workload, cluster, stack, grid, known)
    if simulate:
        many = simulated_many(workload, cluster, stack, grid, many, known)
    return told_each(workload, cluster, stack, grid, many, known)


def told_each(
    workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, many: Estimates, known: Calibration
) -> list[Estimate]:
    """What was predicted for the grid, an Estimate of every layout."""
    memory = memory_per_stage(workload, cluster, stack, grid, known)
    time = [getattr(many, name).tolist() for name in TIME_PARTS]
    totals = [getattr(many, name).tolist() for name in ("sec_per_it", "mem_gib", "reported_mem_gib", "fits")]
    return [
        Estimate(
            sec_per_it=seconds,
            time=TimeParts(**dict(zip(TIME_PARTS, parts, strict=True))),
            mem_gib=mem_gib,
            reported_mem_gib=reported,
            memory=stages,
            fits=fits,
            stage_split=grid.splits.splits[split][1],
            micro_batches=micro_batches,
            calibrated_by=known.origin,
            time_error=known.time_error,
            mem_error=known.mem_error,
        )
        for seconds, mem_gib, reported, fits, parts, stages, split, micro_batches in zip(
            *totals, zip(*time, strict=True), memory, grid.own_split.tolist(), grid.micro_batches.tolist(), strict=True
        )
    ]


def estimate_many(
    workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, calibration: Calibration | None = None
) -> Estimates:
    """Predict every layout of the grid, in the grid's order."""
    known = resolve_calibration(cluster, stack, calibration)
    chunks = [grid.take(slice(start, start + CHUNK)) for start in range(0, max(len(grid), 1), CHUNK)]
    return Estimates.join([_evaluate(workload, cluster, stack, chunk, known) for chunk in chunks])


def simulated_many(
    workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, found: Estimates, calibration: Calibration
) -> Estimates:
    """The closed form's predictions of the grid with what waits in the pipeline (sends and bubble) simulated."""
    times = stage_work(workload, cluster, stack, grid, calibration).times
    runs = pipeline_runs(grid, times)
    busy = reduce(np.add, (getattr(found, name) for name in ("forward", "backward", "recompute", "head", "tp")))
    waits = np.where(grid.pp > 1, np.maximum(play(runs) * calibration.time_scale - busy, 0.0), 0.0)
    # Stages that share cores take longer while all of them work, of which the closed form knows and a player does not.
    waits = np.where(times.crowding > 1.0, np.maximum(waits, found.pp + found.bubble), waits)
    sends = np.minimum(found.pp, waits)
    parts = {name: getattr(found, name) for name in TIME_PARTS} | {"pp": sends, "bubble": waits - sends}
    return replace(found, **parts, sec_per_it=_added(parts))


def memory_per_stage(
    workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, calibration: Calibration
) -> list[tuple[MemoryParts, ...]]:
    """Memory of a rank of each pipeline stage, first to last, of every layout of the grid."""
    rows = np.repeat(np.arange(len(grid)), grid.pp)
    stages = np.arange(len(rows)) - np.repeat(np.cumsum(grid.pp) - grid.pp, grid.pp)
    layers = grid.splits.layers(grid.own_split).sum(axis=1)[rows, stages]
    each = grid.take(rows)
    shape = StageShape(layers * 1.0, in_flight(each, stages * 1.0), stages == 0, stages == each.pp - 1)
    memory = stage_memory(workload, cluster, stack, each, calibration, shape)
    columns = zip(*((getattr(memory, name) / GIB).tolist() for name in MEMORY_PARTS), strict=True)
    # Made unchecked: hundreds of stages, and figures of the model's own.
    found = [
        MemoryParts.model_construct(stage=stage, layers=n, **dict(zip(MEMORY_PARTS, parts, strict=True)))
        for stage, n, parts in zip(stages.tolist(), layers.tolist(), columns, strict=True)
    ]
    ends = np.cumsum(grid.pp).tolist()
    return [tuple(found[end - own : end]) for end, own in zip(ends, grid.pp.tolist(), strict=True)]


def time_many(workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, calibration: Calibration) -> Floats:
    """Seconds per iteration alone, shape (n,)."""
    chunks = [grid.take(slice(start, start + CHUNK)) for start in range(0, max(len(grid), 1), CHUNK)]
    parts = [_time_parts(workload, cluster, stack, chunk, calibration, apart=False) for chunk in chunks]
    return np.concatenate([_added(own) for own in parts])


def busy_many(workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, calibration: Calibration) -> Floats:
    """Seconds in which the slowest stage computes and reduces over TP, recomputation apart, shape (n,)."""
    work = stage_work(workload, cluster, stack, grid, calibration)
    once = work.layers * (work.layer_forward + work.layer_backward) + work.ends + work.tp_time
    return np.asarray(grid.micro_batches * once * calibration.time_scale)


def stages_many(
    workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, calibration: Calibration
) -> Floats:
    """Seconds per iteration that the pipeline takes on links between its stages without delay, shape (n,).

    Less than the whole by sends, data parallelism and the optimizer's step.
    """
    times = stage_work(workload, cluster, stack, grid, calibration).times
    silent = silent_time(grid, times) + _overhead(grid, stack, Network(cluster, calibration), calibration)
    return np.asarray(silent * calibration.time_scale)


def memory_many(
    workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, calibration: Calibration
) -> tuple[Floats, Floats]:
    """GiB of the fullest rank: all of it, and as the stack's own tool reports it; shape (n,) each."""
    stages = [stage_memory(workload, cluster, stack, grid, calibration, shape) for shape in _end_shapes(grid)]
    fullest = np.maximum(np.maximum(stages[0].total, stages[1].total), stages[2].total) / GIB
    if stack.memory_report == "resident":
        return fullest, fullest
    # A log or nvidia-smi shows the node of rank 0, which holds the first stage.
    if stack.memory_report == "node_used":
        return fullest, stages[0].total / GIB * np.minimum(grid.devices, cluster.devices_per_node)
    return fullest, (stages[0].total if stack.memory_report == "device_used" else stages[0].allocated) / GIB


def _evaluate(
    workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, calibration: Calibration
) -> Estimates:
    parts = _time_parts(workload, cluster, stack, grid, calibration)
    total = _added(parts)
    memory, reported = memory_many(workload, cluster, stack, grid, calibration)
    fits = memory <= memory_limit_gib(cluster, grid.devices)
    return Estimates(**parts, sec_per_it=total, mem_gib=memory, reported_mem_gib=reported, fits=fits)


def _added(parts: dict[str, Floats]) -> Floats:
    """Sum in the parts' order: NumPy's own sum adds one layout and many in different orders."""
    return reduce(np.add, parts.values())


def _time_parts(
    workload: Workload,
    cluster: Cluster,
    stack: Stack,
    grid: LayoutGrid,
    calibration: Calibration,
    *,
    apart: bool = True,
) -> dict[str, Floats]:
    model = workload.model
    own = [parameters(model, stack, grid, shape) for shape in _end_shapes(grid)]
    largest = np.maximum(np.maximum(own[0], own[1]), own[2])
    work = stage_work(workload, cluster, stack, grid, calibration)
    run = pipeline_time(grid, work.times, apart=apart)
    m = grid.micro_batches.astype(np.float64)
    network = Network(cluster, calibration)
    tied = np.where((grid.pp > 1) & model.tied_embedding & (model.head == "vocabulary"), 1.0, 0.0)
    tied = tied * padded_vocab_of(model, stack, grid.tp) * model.hidden / grid.tp
    dp = exposed_time(grid, stack, network, calibration, largest, tied, work.layer_backward * work.layers)
    layers = work.layers
    parts = {
        "forward": m * layers * work.layer_forward,
        "backward": m * layers * work.layer_backward,
        "recompute": m * layers * work.layer_recompute,
        "head": m * work.ends,
        "tp": m * work.tp_time,
        "pp": run.sends,
        "bubble": run.bubble,
        "dp": dp,
        "optimizer": step_time(grid, stack, workload.optimizer, largest, work.rate),
        "overhead": _overhead(grid, stack, network, calibration),
    }
    return {name: value * calibration.time_scale for name, value in parts.items()}


def _overhead(grid: LayoutGrid, stack: Stack, network: Network, calibration: Calibration) -> Floats:
    """Seconds that every micro-batch and every iteration cost besides."""
    own = grid.micro_batches * calibration.micro_batch_ms * 1e-3 + calibration.iteration_ms * 1e-3
    return np.asarray(own + _agreement(grid, stack, network))


def _agreement(grid: LayoutGrid, stack: Stack, network: Network) -> Floats:
    """Seconds in which the ranks agree on loss and gradient norm, where that crosses a shaped network."""
    if network.cluster.shaped is None or stack.framework != "trimaran":
        return np.zeros(len(grid))
    everyone = group(grid.devices, np.ones_like(grid.devices), grid.devices, network.cluster)
    few_numbers = np.full(len(grid), 32.0)
    return np.where(everyone.crosses, network.all_reduce(few_numbers, everyone), 0.0)


def _end_shapes(grid: LayoutGrid) -> tuple[StageShape, StageShape, StageShape]:
    """The first, the fullest middle and the last stage as the memory model sees them."""
    single = grid.pp == 1
    yes, no = np.ones(len(grid), dtype=bool), np.zeros(len(grid), dtype=bool)
    last = np.maximum(grid.pp - 1, 0).astype(np.float64)
    zero, one = np.zeros(len(grid)), np.minimum(last, 1.0)
    return (
        StageShape(grid.splits.first[grid.own_split].astype(np.float64), in_flight(grid, zero), yes, single),
        StageShape(grid.splits.middle[grid.own_split].astype(np.float64), in_flight(grid, one), no, no),
        StageShape(grid.splits.last[grid.own_split].astype(np.float64), in_flight(grid, last), single, yes),
    )
