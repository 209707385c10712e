"""Pipelines: what the time of a pipeline depends on beside the times of its stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from trimaran.cost.grid import Bools, Ints, LayoutGrid
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
    def of(cls, grid: LayoutGrid, rows: Ints | slice = slice(None)) -> Self:
        """Those of the grid's layouts at `rows`, or of all."""
        return cls(
            schedule=grid.schedule[rows],
            ranks=grid.pp[rows],
            chunks=grid.vpp[rows],
            micro_batches=grid.micro_batches[rows],
            split_row=grid.split_row[rows],
            splits=grid.splits,
        )

    def take(self, rows: Ints) -> Self:
        """The pipelines at `rows`."""
        return type(self)(
            schedule=self.schedule[rows],
            ranks=self.ranks[rows],
            chunks=self.chunks[rows],
            micro_batches=self.micro_batches[rows],
            split_row=self.split_row[rows],
            splits=self.splits,
        )

    def runs(self, schedule: Schedule) -> Bools:
        """Which of them run a schedule, shape (n,)."""
        return np.asarray(self.schedule == index_of("schedule", schedule))
