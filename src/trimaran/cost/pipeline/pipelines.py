"""Pipelines: what the time of a pipeline depends on beside the times of its stages."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import numpy as np

from trimaran.cost.grid import Bools, Floats, Ints, LayoutGrid
from trimaran.cost.pipeline.stage_times import StageTimes
from trimaran.cost.splits.split_table import SplitTable
from trimaran.layout.choices import index_of
from trimaran.nouns.stack import Schedule


@dataclass(frozen=True)
class Pipelines:
    """n pipelines; every field but `splits` is an array of shape (n,).

    `schedule` is the index of its word, `split_row` the row of the stage split in `splits`. Far fewer columns than a
    LayoutGrid's, which are copied for every group of pipelines that have a formula in common.
    """

    schedule: Ints
    ranks: Ints
    chunks: Ints
    micro_batches: Ints
    split_row: Ints
    splits: SplitTable

    @classmethod
    def of(cls, grid: LayoutGrid) -> Self:
        """Those of a grid's layouts; nothing is copied."""
        return cls(grid.schedule, grid.pp, grid.vpp, grid.micro_batches, grid.split_row, grid.splits)

    def take(self, rows: Ints) -> Self:
        """The pipelines at `rows`."""
        columns = {field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "splits"}
        return replace(self, **columns)

    def runs(self, schedule: Schedule) -> Bools:
        """Which of them run a schedule, shape (n,)."""
        return np.asarray(self.schedule == index_of("schedule", schedule))


@dataclass(frozen=True)
class AlikePipelines:
    """Pipelines of one schedule that have as many pivots: arrays over layouts."""

    schedule: Schedule
    pipelines: Pipelines
    times: StageTimes
    pivots: int

    @property
    def blocks(self) -> bool:
        """Whether ranks wait while they send."""
        return self.schedule in self.times.blocks

    @cached_property
    def p(self) -> Floats:
        """Ranks of each."""
        return self.pipelines.ranks * 1.0

    @cached_property
    def m(self) -> Floats:
        """Micro-batches of each."""
        return self.pipelines.micro_batches * 1.0

    @property
    def splits(self) -> SplitTable:
        """Stage splits, of which each pipeline has the one at its `split_row`."""
        return self.pipelines.splits

    @property
    def split_row(self) -> Ints:
        """Row of each pipeline's stage split."""
        return self.pipelines.split_row
