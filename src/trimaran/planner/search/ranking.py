"""Ranking: the best layouts of a search so far, and what it met that does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trimaran.cost.estimates import Estimates
from trimaran.cost.grid import STACK_SPLIT, Floats, Ints, distinct
from trimaran.layout.choices import CHOICES
from trimaran.planner.search.objective import EQUAL, Objective
from trimaran.planner.search.sieve import Columns, take

# Layouts kept of each block that do not fit: the best may yet become better than some of them.
KEPT_UNFIT = 64
# What makes two layouts different in a ranking: all but placement and stage split.
DISTINCT = (*(choice.name for choice in CHOICES if choice.distinct), "global_batch")
# What makes two layouts of a plan different whatever they take: virtual stages do so by what they bring alone.
KINDS = tuple(name for name in DISTINCT if name != "vpp")
RECOMPUTED = ("recompute", "recompute_every")


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

    def merge(
        self, rows: Columns, value: Floats, seconds: Floats, memory: Floats, *, objective: Objective, top: int
    ) -> None:
        """Take in layouts that fit, and keep the `top` best.

        Of those that differ in placement and stage split alone that is the best, or the best under the split that the
        software makes by itself where that is as good.
        """
        if self.rows:
            rows = {name: np.concatenate([self.rows[name], rows[name]]) for name in rows}
        value = np.concatenate([self.value, value])
        seconds = np.concatenate([self.sec_per_it, seconds])
        memory = np.concatenate([self.mem_gib, memory])
        order = in_order(objective, value, memory, rows)
        rows, seconds = take(rows, order), seconds[order]
        chosen, alike = _alike(rows, DISTINCT)
        by_itself = np.flatnonzero((rows["split"] == STACK_SPLIT) & (seconds <= seconds[chosen][alike] * EQUAL))[::-1]
        chosen[alike[by_itself]] = by_itself
        kept = np.sort(chosen)
        kept = kept[np.argsort(value[order][kept], kind="stable")][:top]
        self.rows, self.sec_per_it = take(rows, kept), seconds[kept]
        self.value, self.mem_gib = value[order][kept], memory[order][kept]

    def value_of_kind(self, number: int) -> float:
        """The value of the best layout of the `number`-th best kind; infinite where there are fewer kinds."""
        first = np.sort(_alike(self.rows, KINDS)[0]) if self.rows else np.empty(0, dtype=np.int64)
        return float(self.value[first[number - 1]]) if len(first) >= number else np.inf

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


def _alike(rows: Columns, names: Sequence[str]) -> tuple[Ints, Ints]:
    """The first row of each set that is equal in those columns, and the set of each row."""
    return distinct([rows[name] for name in names if name in rows])


def telling(order: Ints, seconds: Floats, memory: Floats, uneven: Ints, rows: Columns) -> Ints:
    """An order of layouts, best first, without those that say nothing beside one that stays.

    A layout that computes more again than a faster one, or has more virtual stages, and needs as much memory, has no
    use. Of layouts that differ in virtual stages alone and are as good, the one stays whose stages are least `uneven`,
    the fastest of such.
    """
    _, but_recompute = _alike(rows, [name for name in DISTINCT if name not in RECOMPUTED])
    _, but_chunks = _alike(rows, KINDS)
    lean, as_good = dict[int, float](), dict[int, list[list[int]]]()
    for row in order.tolist():
        needs, sets = float(memory[row]) * EQUAL, as_good.setdefault(int(but_chunks[row]), [])
        fewer = (memory[other] for each in sets for other in each if rows["vpp"][other] < rows["vpp"][row])
        if needs >= lean.get(int(but_recompute[row]), np.inf):
            continue
        lean[int(but_recompute[row])] = float(memory[row])
        if sets and seconds[row] <= seconds[sets[-1][0]] * EQUAL:
            sets[-1].append(row)
        elif needs < min(fewer, default=np.inf):
            sets.append([row])
    kept = [min(each, key=lambda row: uneven[row]) for sets in as_good.values() for each in sets]
    return order[np.isin(order, kept)]


def in_order(objective: Objective, value: Floats, memory: Floats, rows: Columns) -> Ints:
    """Best first; of equally good layouts (to seven digits) the one that needs less memory, then the plainer one."""
    first, then = objective.in_parts(value)
    rounded = np.minimum(then / then.min(), 1e30).astype(np.float32)
    return np.lexsort((rows["split"], rows["placement"], memory, rounded, first))
