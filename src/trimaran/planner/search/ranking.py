"""Ranking: the best layouts of a search so far, and what it met that does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trimaran.cost.estimates import Estimates
from trimaran.cost.grid import Floats, Ints, distinct
from trimaran.layout.choices import CHOICES
from trimaran.planner.search.sieve import Columns, take

# Layouts kept of each block that do not fit: the best may yet become better than some of them.
KEPT_UNFIT = 64
# What makes two layouts different in a ranking: all but placement and stage split.
DISTINCT = (*(choice.name for choice in CHOICES if choice.distinct), "global_batch")


@dataclass(frozen=True)
class OverLimit:
    """A layout, as columns of one row, that is over the memory limit by the factor `excess`."""

    row: Columns
    value: float
    excess: float


@dataclass
class Ranking:
    """The best distinct layouts so far, best first, and what was met on the way."""

    rows: Columns = field(default_factory=dict)
    value: Floats = field(default_factory=lambda: np.empty(0))
    sec_per_it: Floats = field(default_factory=lambda: np.empty(0))
    mem_gib: Floats = field(default_factory=lambda: np.empty(0))
    # All that is predicted of them, once they are simulated.
    simulated: Estimates | None = None
    evaluated: int = 0
    fitting: int = 0
    unmet: int = 0
    over_limit: list[OverLimit] = field(default_factory=list)

    def merge(self, rows: Columns, value: Floats, seconds: Floats, memory: Floats, top: int) -> None:
        """Take in layouts that fit, and keep the `top` best."""
        if self.rows:
            rows = {name: np.concatenate([self.rows[name], rows[name]]) for name in rows}
        value = np.concatenate([self.value, value])
        seconds = np.concatenate([self.sec_per_it, seconds])
        memory = np.concatenate([self.mem_gib, memory])
        order = in_order(value, memory, rows)
        rows = take(rows, order)
        kept = np.sort(distinct([rows[name] for name in DISTINCT if name in rows])[0])[:top]
        self.rows, self.mem_gib = take(rows, kept), memory[order][kept]
        self.value, self.sec_per_it = value[order][kept], seconds[order][kept]

    def note_unfit(self, rows: Columns, value: Floats, excess: Floats) -> None:
        """Remember what comes nearest to fitting, of the layouts that would beat the best so far."""
        faster = np.flatnonzero(value < (self.value[0] if len(self.value) else np.inf))
        for nearest in faster[np.argsort(excess[faster], kind="stable")][:KEPT_UNFIT]:
            row = take(rows, slice(nearest, nearest + 1))
            self.over_limit.append(OverLimit(row, float(value[nearest]), float(excess[nearest])))

    def nearest_unfit(self) -> list[OverLimit]:
        """What does not fit, nearest to it first: where there is a best, what would beat it."""
        best = float(self.value[0]) if len(self.value) else np.inf
        return sorted((noted for noted in self.over_limit if noted.value < best), key=lambda noted: noted.excess)


def in_order(value: Floats, memory: Floats, rows: Columns) -> Ints:
    """Best first; of equally good layouts (to seven digits) the one that needs less memory, then the plainer one."""
    rounded = np.minimum(value / value.min(), 1e30).astype(np.float32)
    return np.lexsort((rows["split"], rows["placement"], memory, rounded))
