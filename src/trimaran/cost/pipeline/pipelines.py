"""Pipelines: what the time of a pipeline depends on beside the times of its stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

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
        columns = grid.schedule, grid.pp, grid.vpp, grid.micro_batches, grid.split_row
        return cls(*(column[rows] for column in columns), grid.splits)

    def take(self, rows: Ints) -> Self:
        """The pipelines at `rows`."""
        columns = self.schedule, self.ranks, self.chunks, self.micro_batches, self.split_row
        return type(self)(*(column[rows] for column in columns), self.splits)

    def runs(self, schedule: Schedule) -> Bools:
        """Which of them run a schedule, shape (n,)."""
        return self.schedule == index_of("schedule", schedule)
