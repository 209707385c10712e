"""Effect: a cause of time, as a function of one iteration that returns named parts in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.cost.memory.stage import fullest_parameters
from trimaran.cost.network import Group, Network, group, group_along
from trimaran.cost.pipeline.closed_form import PipelineTime, pipeline_time
from trimaran.cost.stage_work import StageWork, stage_work
from trimaran.layout.layout import Layout


@dataclass
class IterationCost:
    """One iteration of every layout of a grid, and what several effects need of it.

    Unless `apart`, all waiting in the pipeline is told as sends, which is quicker.
    """

    case: Case
    grid: LayoutGrid
    apart: bool = True

    @cached_property
    def work(self) -> StageWork:
        """What the stages do in one micro-batch."""
        return stage_work(self.case, self.grid)

    @cached_property
    def pipeline(self) -> PipelineTime:
        """Time of all micro-batches through the pipeline."""
        return pipeline_time(self.grid, self.work.times, apart=self.apart)

    @cached_property
    def parameters(self) -> Floats:
        """Parameters on the rank that has most of them, before ZeRO shards them."""
        return self._fullest[0]

    @cached_property
    def expert_parameters(self) -> Floats | None:
        """Those of them that are routed experts'; None where the model has none."""
        return self._fullest[1]

    @cached_property
    def _fullest(self) -> tuple[Floats, Floats | None]:
        return fullest_parameters(self.case.model, self.case.stack, self.grid)

    @cached_property
    def network(self) -> Network:
        """Times of collectives and sends."""
        return Network(self.case.cluster, self.case.calibration)

    def group_along(self, *axes: str) -> Group:
        """The group of ranks that differ along the axes together, on nodes filled in rank order."""
        return group_along(self.grid, self.network.cluster, *axes)

    @property
    def end_stages(self) -> Group:
        """The ranks of the first and of the last stage that hold the same part of a tied embedding."""
        grid = self.grid
        both = np.where(grid.pp > 1, 2, 1)
        stride = grid.stride("pp")
        return group(both, stride * (grid.pp - 1), grid.devices, self.network.cluster, block=stride * grid.pp)

    @property
    def micro_batches(self) -> Floats:
        """Micro-batches of one replica."""
        return self.grid.micro_batches * 1.0


# Why a layout loses time to a part, and what would lessen it: of the layout, its case and its micro-batches.
Cause = Callable[[Layout, Case, int], str]


@dataclass(frozen=True)
class TimePart:
    """One named part of an iteration: what it is, for a legend, and the cause where another layout could avoid it."""

    name: str
    says: str
    cause: Cause | None = None


@dataclass(frozen=True)
class Effect:
    """A cause of time: its parts, and their seconds exposed along the slowest stage, shape (n,) each."""

    parts: tuple[TimePart, ...]
    seconds: Callable[[IterationCost], Mapping[str, Floats]]
