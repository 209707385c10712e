"""Search: every valid layout, ranked; best first, with bounds, so that a million need not be evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.estimate import busy_many, estimate_many, memory_many, simulated_many, stages_many, time_many
from trimaran.cost.estimates import Estimates
from trimaran.cost.grid import Bools, Floats, Ints, distinct
from trimaran.cost.memory.limit import memory_limit_gib
from trimaran.cost.similar import at_least
from trimaran.layout.axes import PLACEMENTS, devices_of
from trimaran.layout.choices import CHOICES, index_of
from trimaran.planner.search.candidates import Parts, Proposer
from trimaran.planner.search.objective import Objective
from trimaran.planner.search.sieve import Columns, count, take

# (TP, PP, DP, MBS) rows that are expanded at once: few at first, which give a threshold to the others.
BLOCK = 32
LARGEST_BLOCK = 2048
# The bound on a layout's time leaves out all that choices can change; this much more is left for what
# the slowest stage's share of the layers can change.
BOUND_SLACK = 0.95
# The same once virtual stages, schedule and split are chosen: recompute, sequence parallelism and sharding change less.
CHOICE_SLACK = 0.98
# A simulation may rank before a layout another that the closed form puts behind it by less than this factor: on the
# best thousands of benchmarks/planner.py the closed form is at most 6% below the simulation and 3% above it.
BEHIND = 1.1
# Layouts within this factor of the fastest are as good: predictions err by ten times as much, and a run that is
# repeated on the same machine differs by about so much. Of them the plainest is the first.
EQUAL = 1.01
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

    def nearest_unfit(self) -> Columns | None:
        """The layout that comes nearest to fitting, of those that would beat the best.

        Where none would, the one that comes nearest to both.
        """
        best = float(self.value[0]) if len(self.value) else np.inf

        def distance(layout: OverLimit) -> tuple[bool, float]:
            slower = layout.value >= best
            return slower, layout.excess * (layout.value / best if slower and np.isfinite(best) else 1.0)

        nearest = min(self.over_limit, key=distance, default=None)
        return None if nearest is None else nearest.row


@dataclass(frozen=True)
class Search:
    """One question's search. `search()` gives the `top` best distinct layouts by the closed form.

    Where no limit is asked for, only those of them that `simulate()` may yet put among the first `shown`.
    """

    case: Case
    proposer: Proposer
    objective: Objective
    mem_margin: float
    top: int
    shown: int

    @cached_property
    def bounding(self) -> Case:
        """The case under which a partial layout takes and holds no more than any that it may become."""
        return self.case.calibrated(at_least(self.case.calibration))

    def search(self) -> Ranking:
        """Best-first search over (TP, PP, DP, MBS), each expanded into all that goes with it."""
        ranking = Ranking()
        parts = self.proposer.parts()
        rows, bound = self._promising(parts, ranking)
        order = np.argsort(bound, kind="stable")
        start, size = 0, BLOCK
        while start < len(order):
            block = order[start : start + size]
            block = block[bound[block] <= self._threshold(ranking)]
            if not len(block):
                break
            self._expand(take(rows, block), parts, ranking)
            start, size = start + size, min(4 * size, LARGEST_BLOCK)
        return ranking

    def simulate(self, ranking: Ranking) -> None:
        """Rank the best anew by what a simulation of their pipelines says, the objective's limits included.

        The first is the plainest of those that are as good as the best, the others follow by their value.
        """
        most = int(np.count_nonzero(ranking.value <= self._threshold(ranking)))
        best = {name: values[:most] for name, values in ranking.rows.items()}
        grid = self.proposer.grid(best)
        closed = estimate_many(self.case, grid)
        simulated = simulated_many(self.case, grid, closed)
        value = self.objective.value(simulated.sec_per_it, grid.devices, grid.global_batch)
        about = self.case.workload, self.case.cluster
        met = self.objective.meets(simulated.sec_per_it, grid.devices, grid.global_batch, *about)
        order = _order(value, ranking.mem_gib[:most], best)
        order = order[met[order]]
        order = self._plainest_first(order, value, simulated.sec_per_it / grid.global_batch, best)
        ranking.unmet += int(np.count_nonzero(~met))
        ranking.rows = take(best, order)
        ranking.value, ranking.sec_per_it = value[order], simulated.sec_per_it[order]
        ranking.mem_gib, ranking.simulated = ranking.mem_gib[order], simulated.take(order)

    def _plainest_first(self, order: Ints, value: Floats, seconds: Floats, rows: Columns) -> Ints:
        """The order with the plainest of its equals put first: of those, the layout that needs no unusual means."""
        if not len(order):
            return order
        equal = order[self.objective.as_good(value[order], seconds[order], EQUAL)]
        first = equal[np.argmin(_unusual_means(take(rows, equal)))]
        return np.concatenate([[first], order[order != first]])

    def variants(self, rows: Columns) -> Ints:
        """How many layouts each row of a ranking stands for: those that fit and differ in placement or split alone."""
        plain = {name: values for name, values in rows.items() if name not in ("placement", "split")}
        each = self.proposer.placements(self.proposer.splits(plain | {"row": np.arange(count(rows))}))
        row = each.pop("row")
        return np.bincount(row[self._memory(each) <= self._limit(each)], minlength=count(rows))

    def _promising(self, parts: Parts, ranking: Ranking) -> tuple[Columns, Floats]:
        """(TP, PP, DP, MBS) rows that can fit and meet the objective's limits, each with a bound on its value."""
        proposer = self.proposer
        degrees = proposer.degrees(parts)
        if not count(degrees):
            return degrees, np.empty(0)
        smallest = _smallest_batch(parts.batch)
        least = degrees | {name: smallest[name][np.searchsorted(smallest["dp"], degrees["dp"])] for name in smallest}
        fits, _ = self._lean(least, parts, ranking)
        rows = proposer.with_batches(take(degrees, fits), parts)
        if not count(rows):
            return rows, np.empty(0)
        fits, seconds = self._lean(rows, parts, ranking)
        devices = devices_of(rows)
        batch = rows["global_batch"]
        bound = self.objective.value(seconds * BOUND_SLACK, devices, batch)
        met = self.objective.meets(seconds * BOUND_SLACK, devices, batch, self.case.workload, self.case.cluster)
        ranking.unmet += int(np.count_nonzero(fits & ~met))
        promising = fits & met
        return take(rows, promising), bound[promising]

    def _lean(self, rows: Columns, parts: Parts, ranking: Ranking) -> tuple[Bools, Floats]:
        """Whether each row fits in its leanest form, and seconds of compute alone in its fastest one.

        The leanest has the highest ZeRO stage, most recomputation and sequence parallelism; the fastest
        recomputes least, waits for nothing and has its layers spread best. Neither need be a valid layout.
        """
        common = self._leanest(rows, parts)
        lean, fast = (common | {"recompute": np.full(count(rows), choose(self.proposer.space["recompute"]))}
                      for choose in (max, min))  # fmt: skip
        excess = self._least_memory(lean) / self._limit(rows)
        fits = excess <= 1.0
        # Nothing is ranked yet, so that of those that do not fit the nearest to it are worth their time's prediction.
        nearest = np.flatnonzero(~fits)[np.argsort(excess[~fits], kind="stable")[:KEPT_UNFIT]]
        if len(nearest):
            unfit = take(lean, nearest)
            self._note_unfit(unfit, self._seconds(unfit), excess[nearest], ranking)
        return fits, busy_many(self.bounding, self.proposer.grid(fast))

    def _leanest(self, rows: Columns, parts: Parts) -> Columns:
        space, size = self.proposer.space, count(rows)
        lean_zero = int(np.argmax(parts.zero["zero_stage"]))
        columns = {}
        for name in ("zero_stage", "dp_kind"):
            columns[name] = np.full(size, parts.zero[name][lean_zero])
        divides = (self.case.workload.seq_len % rows["tp"] == 0) & (rows["tp"] > 1)
        columns["sequence_parallel"] = np.where(divides, max(space["sequence_parallel"]), 0)
        columns["precision"] = np.full(size, space["precision"][0])
        columns["recompute_every"] = np.full(size, min(space["recompute_every"]))
        columns["split"] = np.full(size, max(space.split))
        if "schedule" not in rows:
            # The schedule that keeps fewest micro-batches in flight, of those that this PP can have.
            order = [index_of("schedule", name) for name in ("none", "1f1b", "zero_bubble", "gpipe", "interleaved")]
            rank = np.array([order.index(int(schedule)) for schedule in parts.pipe["schedule"]])
            best = np.lexsort((parts.pipe["vpp"], rank, parts.pipe["pp"]))
            pp, first = np.unique(parts.pipe["pp"][best], return_index=True)
            chosen = best[first][np.searchsorted(pp, rows["pp"])]
            columns |= {name: parts.pipe[name][chosen] for name in ("vpp", "schedule")}
        columns |= rows
        return self.proposer.usual_placement(columns)

    def _expand(self, rows: Columns, parts: Parts, ranking: Ranking) -> None:
        """Evaluate all layouts of the rows under the usual placement, then the promising ones under the others."""
        proposer = self.proposer
        piped = self._hopeful(proposer.piped(rows, parts), parts, ranking)
        recomputed = self._hopeful(proposer.recomputed(piped), parts, ranking)
        usual = proposer.usual_placement(proposer.sharded(recomputed, parts))
        if not count(usual):
            return
        estimates = self._estimate(usual)
        fits = self._take_in(usual, estimates.sec_per_it, estimates.mem_gib, ranking)
        if len(self.proposer.space["placement"]) == 1:
            return
        quiet = estimates.sec_per_it - estimates.parts["pp"] - estimates.parts["dp"]
        if PLACEMENTS[self.proposer.space["placement"][0]][0] != "tp":
            quiet = quiet - estimates.parts["tp"]  # else no other placement keeps more of a TP group inside a node
        devices = devices_of(usual)
        hopeful = fits & (self.objective.value(quiet, devices, usual["global_batch"]) <= self._threshold(ranking))
        placed = self.proposer.placements(take(usual | {"row": np.arange(count(usual))}, hopeful))
        placed = take(placed, placed["placement"] != self.proposer.space["placement"][0])
        # Where its ranks are does not change what a layout holds.
        memory = estimates.mem_gib[placed.pop("row")]
        if count(placed):
            self._take_in(placed, self._seconds(placed), memory, ranking)

    def _hopeful(self, rows: Columns, parts: Parts, ranking: Ranking) -> Columns:
        """Partial layouts that can still fit and enter the ranking, whatever is chosen besides."""
        if not count(rows):
            return rows
        space = self.proposer.space
        least, most = min(space["recompute_every"]), max(space["recompute_every"])
        lean = {"recompute": max(space["recompute"]), "recompute_every": least}
        rows = take(rows, self._least_memory(self._leanest(_with_defaults(rows, lean), parts)) <= self._limit(rows))
        if not count(rows):
            return rows
        fast = {"recompute": min(space["recompute"]), "recompute_every": most}
        grid = self.proposer.grid(self._leanest(_with_defaults(rows, fast), parts))
        # How replicas agree, and over which links, is not chosen yet.
        quiet = stages_many(self.bounding, grid)
        value = self.objective.value(quiet * CHOICE_SLACK, grid.devices, rows["global_batch"])
        return take(rows, value <= self._threshold(ranking))

    def _take_in(self, rows: Columns, seconds: Floats, memory: Floats, ranking: Ranking) -> Bools:
        """Merge evaluated layouts into the ranking; answers which of them fit."""
        limit = self._limit(rows)
        fits = memory <= limit
        devices = devices_of(rows)
        value = self.objective.value(seconds, devices, rows["global_batch"])
        met = self.objective.meets(seconds, devices, rows["global_batch"], self.case.workload, self.case.cluster)
        ranking.evaluated += len(fits)
        ranking.fitting += int(np.count_nonzero(fits))
        ranking.unmet += int(np.count_nonzero(fits & ~met))
        chosen = fits & met & (value <= self._threshold(ranking)) & np.isfinite(value)
        if chosen.any():
            self._merge(take(rows, chosen), value[chosen], seconds[chosen], memory[chosen], ranking)
        unfit = ~fits & met
        self._note_unfit(take(rows, unfit), seconds[unfit], (memory / limit)[unfit], ranking)
        return fits

    def _merge(self, rows: Columns, value: Floats, seconds: Floats, memory: Floats, ranking: Ranking) -> None:
        if ranking.rows:
            rows = {name: np.concatenate([ranking.rows[name], rows[name]]) for name in rows}
        value = np.concatenate([ranking.value, value])
        seconds = np.concatenate([ranking.sec_per_it, seconds])
        memory = np.concatenate([ranking.mem_gib, memory])
        order = _order(value, memory, rows)
        rows = take(rows, order)
        kept = np.sort(distinct([rows[name] for name in DISTINCT])[0])[: self.top]
        ranking.rows, ranking.mem_gib = take(rows, kept), memory[order][kept]
        ranking.value, ranking.sec_per_it = value[order][kept], seconds[order][kept]

    def _note_unfit(self, rows: Columns, seconds: Floats, excess: Floats, ranking: Ranking) -> None:
        """Remember what comes nearest to fitting, of the layouts that would beat the best so far, else of all."""
        value = self.objective.value(seconds, devices_of(rows), rows["global_batch"])
        best = ranking.value[0] if len(ranking.value) else np.inf
        slower = value >= best
        distance = excess * np.where(slower & np.isfinite(best), value / best, 1.0)
        for nearest in np.lexsort((distance, slower))[:KEPT_UNFIT]:
            row = take(rows, slice(nearest, nearest + 1))
            ranking.over_limit.append(OverLimit(row, float(value[nearest]), float(excess[nearest])))

    def _threshold(self, ranking: Ranking) -> float:
        """The value that a layout must not exceed to enter the ranking."""
        last = float(ranking.value[-1]) if len(ranking.value) >= self.top else np.inf
        # By simulation layouts may miss a limit that they meet by the closed form, and others take their place.
        if self.objective.limited or len(ranking.value) < self.shown:
            return last
        return min(last, float(ranking.value[self.shown - 1]) * BEHIND)

    def _seconds(self, rows: Columns) -> Floats:
        return time_many(self.case, self.proposer.grid(rows))

    def _memory(self, rows: Columns) -> Floats:
        return memory_many(self.case, self.proposer.grid(rows))[0]

    def _least_memory(self, rows: Columns) -> Floats:
        return memory_many(self.bounding, self.proposer.grid(rows))[0]

    def _estimate(self, rows: Columns) -> Estimates:
        return estimate_many(self.case, self.proposer.grid(rows))

    def _limit(self, rows: Columns) -> Floats:
        return memory_limit_gib(self.case.cluster, devices_of(rows), self.mem_margin)


def _order(value: Floats, memory: Floats, rows: Columns) -> Ints:
    """Best first; of equally good layouts (to seven digits) the one that needs less memory, then the plainer one."""
    rounded = np.minimum(value / value.min(), 1e30).astype(np.float32)
    return np.lexsort((rows["split"], rows["placement"], memory, rounded))


def _unusual_means(rows: Columns) -> Ints:
    """How many choices of each layout are at a value that is not plain."""
    unusual = np.zeros(count(rows), dtype=np.int64)
    for choice in CHOICES:
        if choice.plain:
            unusual += ~np.isin(rows[choice.name], [choice.index(value) for value in choice.plain])
    return unusual


def _with_defaults(rows: Columns, usual: dict[str, int]) -> Columns:
    """The rows, with a usual value in the columns that they do not have yet."""
    return {name: np.full(count(rows), value) for name, value in usual.items()} | rows


def _smallest_batch(batch: Columns) -> Columns:
    """The smallest micro-batch of each DP, in order of DP."""
    order = np.lexsort((batch["mbs"], batch["dp"]))
    _, first = np.unique(batch["dp"][order], return_index=True)
    return take(batch, order[first])
