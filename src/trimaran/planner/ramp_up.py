"""Ramp-up: which nodes, batch and micro-batch while the global batch grows, and what the growth costs.

The model-parallel degrees stay; DP and the micro-batch may change from step to step, at the price of
a restart. The cheapest sequence comes from dynamic programming over the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate_many
from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.cost.memory.limit import memory_limit_gib
from trimaran.layout.layout import Layout
from trimaran.layout.rules import check_layout, violations
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import Noun, TrimaranError
from trimaran.nouns.workload import RampUp, Workload
from trimaran.planner.search.objective import Objective

# Checkpoint, stop, wait for the other nodes, start.
RESTART_MINUTES = 15.0


class Phase(Noun):
    """A stretch of the ramp-up on one layout: global batches `first_batch` to `last_batch`."""

    nodes: int
    devices: int
    layout: Layout
    first_batch: int
    last_batch: int
    samples: int
    iterations: int
    hours: float


class RampUpSchedule(Noun):
    """Phases in order, the last one until the end of training where tokens are stated.

    `hours` is their sum with the restarts between them; `fixed_layout_hours` the same growth on the last
    phase's layout alone, None where that cannot run the small batches; `fixed_batch_hours` the same
    samples at the full global batch from the start.
    """

    phases: tuple[Phase, ...]
    restarts: int
    hours: float
    fixed_layout_hours: float | None
    fixed_batch_hours: float

    @property
    def slower_by(self) -> float:
        """How much longer the ramped training takes than one at the full batch, relatively; 0 without samples."""
        return self.hours / self.fixed_batch_hours - 1.0 if self.fixed_batch_hours else 0.0


class _Steps:
    """Batches of the growth with the samples and iterations spent at each."""

    def __init__(self, batches: Sequence[int], samples: Sequence[int]) -> None:
        self.batches = np.array(batches, dtype=np.int64)
        self.samples = np.array(samples, dtype=np.int64)
        self.iterations = -(-self.samples // self.batches)

    @classmethod
    def of(cls, ramp: RampUp, workload: Workload) -> Self:
        """Megatron-LM's rule: the samples are shared evenly over the increments; the rest is at the full batch."""
        batches = ramp.steps(workload.global_batch)
        growing = len(batches) - 1
        each = [ramp.samples // growing] * growing if growing else []
        whole = 0 if workload.tokens is None else workload.tokens // workload.seq_len
        return cls(batches, [*each, max(whole - sum(each), 0)])


def ramp_up_schedule(
    layout: Layout,
    case: Case,
    objective: Objective | None = None,
    *,
    mem_margin: float = 0.05,
    restart_minutes: float = RESTART_MINUTES,
) -> RampUpSchedule:
    """The fastest way through the workload's ramp-up with the layout's TP, PP and choices.

    Ends on `layout` itself, and takes no more devices before. Raises TrimaranError where the workload states no
    ramp-up, or where no DP and micro-batch fit one of its steps, or it misses a limit of the objective.
    """
    workload, cluster = case.workload, case.cluster
    ramp = workload.ramp_up
    if ramp is None:
        raise TrimaranError("ramp_up is not stated: give its start, increment and samples")
    steps = _Steps.of(ramp, workload)
    layouts = _replicas(layout, workload)
    seconds = _sec_per_it(layouts, steps, case, mem_margin)
    runs = np.isfinite(seconds)
    hours = np.where(runs, np.where(runs, seconds, 0.0) * steps.iterations[:, None] / 3600.0, np.inf)
    last = layouts.index(layout)
    if not runs[-1, last]:
        check_layout(layout, workload.model_copy(update={"ramp_up": None}), cluster, case.stack)
        raise TrimaranError(f"layout {layout} does not fit with {mem_margin:.0%} of memory left free: choose another")
    lost = np.flatnonzero(~np.isfinite(hours).any(axis=1))
    if len(lost):
        raise TrimaranError(
            f"no DP and micro-batch fit the ramp-up's global batch {steps.batches[lost[0]]} with TP {layout.tp} and "
            f"PP {layout.pp}: change start or increment"
        )
    path = _cheapest(hours, last, restart_minutes / 60.0)
    phases = _phases(path, layouts, steps, hours, cluster)
    held = float(hours[:, last].sum())
    iterations = -(-steps.samples.sum() // steps.batches[-1])
    schedule = RampUpSchedule(
        phases=phases,
        restarts=len(phases) - 1,
        hours=sum(phase.hours for phase in phases) + (len(phases) - 1) * restart_minutes / 60.0,
        fixed_layout_hours=held if np.isfinite(held) else None,
        fixed_batch_hours=float(seconds[-1, last] * iterations / 3600.0),
    )
    _refuse_beyond_limits(schedule, objective or Objective(), cluster, restart_minutes / 60.0)
    return schedule


def _refuse_beyond_limits(
    schedule: RampUpSchedule, objective: Objective, cluster: Cluster, restart_hours: float
) -> None:
    """Raise TrimaranError where the ramped training misses a limit that a search held at the full batch alone.

    The devices of a phase are paid for while all starts anew on them.
    """
    layout, days = schedule.phases[-1].layout, schedule.hours / 24.0
    ways_out = "shorten the ramp-up, start it at a larger batch, or allow more"
    if objective.deadline_days is not None and days > objective.deadline_days:
        raise TrimaranError(
            f"with its ramp-up {layout} takes {days:.4g} days, beyond the deadline of {objective.deadline_days:.4g}: "
            f"{ways_out} time"
        )
    device_hours = sum(phase.hours * phase.devices for phase in schedule.phases)
    device_hours += restart_hours * sum(phase.devices for phase in schedule.phases[1:])
    cost = device_hours * (cluster.price_per_device_hour or 0.0)
    if objective.budget is not None and cost > objective.budget:
        raise TrimaranError(
            f"with its ramp-up {layout} costs {cost:,.0f}, beyond the budget of {objective.budget:,.0f}: "
            f"{ways_out} money"
        )


def _replicas(layout: Layout, workload: Workload) -> list[Layout]:
    """The layout under every DP and every micro-batch no larger than its own; `layout` itself last."""
    others = [
        layout.model_copy(update={"dp": dp, "mbs": mbs})
        for dp in range(1, layout.dp + 1)
        for mbs in range(1, max(layout.mbs, 1) + 1)
        if workload.global_batch % dp == 0 and (dp, mbs) != (layout.dp, layout.mbs)
    ]
    return [*others, layout]


def _sec_per_it(
    layouts: list[Layout],
    steps: _Steps,
    case: Case,
    mem_margin: float,
) -> Floats:
    """Seconds per iteration, infinite where a layout is not valid or does not fit; shape (steps, layouts)."""
    grid = LayoutGrid.from_layouts(layouts, case.workload, case.stack)
    limit = memory_limit_gib(case.cluster, grid.devices, mem_margin)
    table = np.full((len(steps.batches), len(layouts)), np.inf)
    for row, batch in enumerate(steps.batches.tolist()):
        at_batch = case.workload.model_copy(update={"global_batch": batch, "ramp_up": None})
        valid = np.array([not any(violations(layout, at_batch, case.cluster, case.stack)) for layout in layouts])
        if not valid.any():
            continue
        estimates = estimate_many(case.with_workload(at_batch), grid.with_global_batch(batch))
        runs = valid & (estimates.mem_gib <= limit)
        table[row, runs] = estimates.sec_per_it[runs]
    return table


def _cheapest(hours: Floats, last: int, restart_hours: float) -> list[int]:
    """Layout of each step such that hours and restarts are least in all, ending on `last`."""
    total = hours[0].copy()
    came_from = np.zeros(hours.shape, dtype=np.int64)
    for step in range(1, len(hours)):
        best = int(np.argmin(total))
        stays = total <= total[best] + restart_hours
        came_from[step] = np.where(stays, np.arange(len(total)), best)
        total = np.where(stays, total, total[best] + restart_hours) + hours[step]
    path = [last]
    for step in range(len(hours) - 1, 0, -1):
        path.append(int(came_from[step, path[-1]]))
    return path[::-1]


def _phases(
    path: list[int], layouts: list[Layout], steps: _Steps, hours: Floats, cluster: Cluster
) -> tuple[Phase, ...]:
    starts = [step for step in range(len(path)) if step == 0 or path[step] != path[step - 1]]
    phases = []
    for start, end in zip(starts, [*starts[1:], len(path)], strict=True):
        layout = layouts[path[start]]
        phases.append(
            Phase(
                nodes=-(-layout.devices // cluster.devices_per_node),
                devices=layout.devices,
                layout=layout,
                first_batch=int(steps.batches[start]),
                last_batch=int(steps.batches[end - 1]),
                samples=int(steps.samples[start:end].sum()),
                iterations=int(steps.iterations[start:end].sum()),
                hours=float(hours[np.arange(start, end), path[start]].sum()),
            )
        )
    return tuple(phases)
