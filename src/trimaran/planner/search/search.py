"""Search: every valid layout, ranked; best first, with bounds, so that a million need not be evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.estimate import busy_many, estimate_many, memory_many, simulated_many, stages_many, time_many
from trimaran.cost.estimates import Estimates
from trimaran.cost.grid import STACK_SPLIT, Bools, Floats, Ints, LayoutGrid, among
from trimaran.cost.layers.exchange import FREE
from trimaran.cost.memory.limit import memory_limit_gib
from trimaran.cost.similar import at_least
from trimaran.layout.axes import PLACEMENTS, devices_of
from trimaran.layout.choices import CHOICES, ON_REQUEST, index_of
from trimaran.nouns.stack import Schedule
from trimaran.planner.search.candidates import Parts, Proposer
from trimaran.planner.search.objective import EQUAL, Objective
from trimaran.planner.search.ranking import KEPT_UNFIT, Ranking, in_order, telling
from trimaran.planner.search.sieve import Columns, count, take

# (TP, PP, DP, MBS) rows that are expanded at once: few at first, which give a threshold to the others.
BLOCK = 32
LARGEST_BLOCK = 8192
# For each row of a mixture that is expanded, so many rows' experts are spread at once, in some tens of ways each.
SPREAD = 8
# The bound on a layout's time leaves out all that choices can change; this much more is left for what
# the slowest stage's share of the layers can change.
BOUND_SLACK = 0.95
# The same once virtual stages, schedule and split are chosen: recompute, sequence parallelism and sharding change less.
CHOICE_SLACK = 0.98
# A simulation may rank before a layout another that the closed form puts behind it by less than this factor: on the
# best thousands of benchmarks/planner.py the closed form is at most 6% below the simulation and 3% above it.
BEHIND = 1.1
# What replicas wait for each other, as a share of an iteration, from which on sharing out states among parts of them is
# tried: it can gain no more than that.
LEAST_GAIN = 0.005
_FULL = index_of("recompute", "full")
# Schedules, those first that keep fewer micro-batches in flight.
LEANEST: tuple[Schedule, ...] = ("none", "1f1b", "zero_bubble", "gpipe", "interleaved", "zbv", "dualpipev")


@dataclass(frozen=True)
class Search:
    """One question's search. `search()` gives the `top` best distinct layouts by the closed form.

    Where no limit is asked for, only those of them that `simulate()` may yet put among the first `shown`. None of a
    value above `within` is looked for.
    """

    case: Case
    proposer: Proposer
    objective: Objective
    mem_margin: float
    top: int
    shown: int
    within: float = np.inf

    @cached_property
    def bounding(self) -> Case:
        """The case under which a partial layout takes and holds no more than any that it may become."""
        return self.case.calibrated(at_least(self.case.calibration))

    def search(self) -> Ranking:
        """Best-first search over (TP, PP, DP, MBS), each expanded into all that goes with it."""
        ranking = Ranking()
        parts = self.proposer.parts()
        rows, bound = self._promising(parts, ranking)
        best_first = self._spread_first if self.case.model.experts else self._blocks
        for block in best_first(rows, bound, parts, ranking):
            self._expand(block, parts, ranking)
        return ranking

    def valid_unfit(self, row: Columns, best: float) -> Columns | None:
        """Of the layouts that the degrees of a row can become, that over the limit and of a value below `best` which
        holds least; None where there is none.
        """
        proposer, parts = self.proposer, self.proposer.parts()
        named = {*proposer.degrees(parts), *parts.batch}
        rows = {name: values for name, values in row.items() if name in named}
        for chosen in (proposer.spread, lambda rows: proposer.piped(rows, parts), proposer.recomputed):
            rows = chosen(rows) if count(rows) else rows
        usual = proposer.sharded(rows, parts) if count(rows) else rows
        if not count(usual):
            return None
        excess = self._memory(usual) / self._limit(usual)
        value = self.objective.value(self._seconds(usual), devices_of(usual), usual["global_batch"])
        over = np.flatnonzero((excess > 1.0) & (value < best))
        return take(usual, over[[np.argmin(excess[over])]]) if len(over) else None

    def _blocks(self, rows: Columns, bound: Floats, parts: Parts, ranking: Ranking) -> Iterator[Columns]:
        """Rows in the order of their bounds, few at first, as long as they can enter the ranking."""
        order = np.argsort(bound, kind="stable")
        start, size = 0, BLOCK
        while start < len(order):
            block = order[start : start + size]
            block = block[bound[block] <= self._threshold(ranking)]
            if not len(block):
                return
            yield take(rows, block)
            start, size = start + size, min(4 * size, LARGEST_BLOCK)

    def _spread_first(self, rows: Columns, bound: Floats, parts: Parts, ranking: Ranking) -> Iterator[Columns]:
        """The same of a mixture's rows, their experts spread in every way, in the order of bounds that know of that.

        Exchanges and small products differ far more than what the rows' own bounds know. Rows are spread as long as
        one of them could be better than the next ones in turn.
        """
        order = np.argsort(bound, kind="stable")
        spread, bounds = dict[str, Ints](), np.empty(0)
        start, size = 0, BLOCK
        while True:
            order = order[bound[order] <= self._threshold(ranking)]
            while start < len(order) and np.count_nonzero(bounds <= bound[order[start]]) < size:
                more, their = self._spread(take(rows, order[start : start + SPREAD * size]), parts, ranking)
                spread = {name: np.concatenate([spread.get(name, values[:0]), values]) for name, values in more.items()}
                bounds = np.concatenate([bounds, their])
                start += SPREAD * size
            order_now = np.argsort(bounds, kind="stable")
            order_now = order_now[bounds[order_now] <= self._threshold(ranking)]
            if not len(order_now):
                return
            yield take(spread, order_now[:size])
            spread, bounds = take(spread, order_now[size:]), bounds[order_now[size:]]
            size = min(3 * size, LARGEST_BLOCK)

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
        order = in_order(self.objective, value, ranking.mem_gib[:most], best)
        seconds = simulated.sec_per_it / grid.global_batch
        order = telling(order[met[order]], seconds, ranking.mem_gib, _unevenness(grid), best)
        order = self._plainest_first(order, value, best)
        ranking.unmet += int(np.count_nonzero(~met))
        ranking.rows = take(best, order)
        ranking.value, ranking.sec_per_it = value[order], simulated.sec_per_it[order]
        ranking.mem_gib, ranking.simulated = ranking.mem_gib[order], simulated.take(order)

    def _plainest_first(self, order: Ints, value: Floats, rows: Columns) -> Ints:
        """The order with the plainest of its equals put first: of those, the layout that needs no unusual means."""
        if not len(order):
            return order
        equal = order[self.objective.times(value[order], value[order[0]]) <= EQUAL]
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
        rows = proposer.with_batches(take(degrees, self._fits_lean(least, parts, ranking)), parts)
        if not count(rows):
            return rows, np.empty(0)
        rows = take(rows, self._fits_lean(rows, parts, ranking))
        if not count(rows):
            return rows, np.empty(0)
        seconds = self._least_seconds(rows, parts)
        devices = devices_of(rows)
        batch = rows["global_batch"]
        bound = self.objective.value(seconds, devices, batch)
        met = self.objective.meets(seconds, devices, batch, self.case.workload, self.case.cluster)
        ranking.unmet += int(np.count_nonzero(~met))
        return take(rows, met), bound[met]

    def _fits_lean(self, rows: Columns, parts: Parts, ranking: Ranking) -> Bools:
        """Whether each row fits in its leanest form, and a note of those that nearly do.

        The leanest has the highest ZeRO stage, most recomputation and sequence parallelism; it need not be valid.
        """
        lean = self._leanest(self._with_defaults(rows, {"recompute": self._most}), parts)
        excess = self._least_memory(lean) / self._limit(rows)
        fits = excess <= 1.0
        # Nothing is ranked yet, so that of those that do not fit the nearest to it are worth their time's prediction.
        nearest = np.flatnonzero(~fits)[np.argsort(excess[~fits], kind="stable")[:KEPT_UNFIT]]
        if len(nearest):
            unfit = take(lean, nearest) | self._widest(take(lean, nearest))
            value = self.objective.value(self._seconds(unfit), devices_of(unfit), unfit["global_batch"])
            ranking.note_unfit(unfit, value, excess[nearest])
        return np.asarray(fits)

    def _least_seconds(self, rows: Columns, parts: Parts) -> Floats:
        """Seconds of an iteration that each row takes at least: compute alone in its fastest form.

        That recomputes least, waits for nothing and has its layers spread best; it need not be valid.
        """
        return self._fastest(rows, parts, busy_many) * BOUND_SLACK

    @property
    def _most(self) -> int:
        """The most that layouts may recompute: everything, or else the last word."""
        words = self.proposer.space["recompute"]
        return _FULL if _FULL in words else max(words)

    @property
    def _least(self) -> int:
        """The least that layouts may recompute."""
        return min(self.proposer.space["recompute"])

    def _freely_spread(self, rows: Columns) -> Columns:
        """Experts spread over all ranks of a stage, to which tokens come for nothing: a bound, and no layout."""
        if not self.case.model.experts:
            return {}
        stage = rows["dp"] * rows["tp"] * rows.get("cp", np.ones_like(rows["dp"]))
        return {"ep": stage, "etp": np.ones_like(stage), "dispatcher": np.full(len(stage), FREE)}

    def _widest(self, rows: Columns) -> Columns:
        """Experts spread as widely as a layout can, of each row, and sequences shared out in the first way."""
        kinds = self.proposer.space["cp_kind"]
        usual = [kind for way in self.case.stack.context_parallel if (kind := index_of("cp_kind", way)) in kinds]
        context = {"cp_kind": np.where(rows["cp"] > 1, [*usual, kinds[0]][0], kinds[0])}
        if not self.case.model.experts:
            return context
        plain = {name: np.full(count(rows), self.proposer.space[name][0]) for name in ("etp", "dispatcher")}
        return context | plain | {"ep": np.gcd(self._freely_spread(rows)["ep"], self.case.model.experts)}

    def _leanest(self, rows: Columns, parts: Parts) -> Columns:
        space, size = self.proposer.space, count(rows)
        lean_zero = int(np.argmax(parts.zero["zero_stage"]))
        columns = {}
        for name in ("zero_stage", "dp_kind"):
            columns[name] = np.full(size, parts.zero[name][lean_zero])
        divides = (self.case.workload.seq_len % rows["tp"] == 0) & (rows["tp"] > 1)
        columns["sequence_parallel"] = np.where(divides, max(space["sequence_parallel"]), 0)
        columns["recompute_every"] = np.full(size, min(space["recompute_every"]))
        columns["split"] = np.full(size, max(space.split))
        usual = (name for name in ("precision", *space.unusual("ep_overlap", *ON_REQUEST)) if name not in self._several)
        columns |= {name: np.full(size, space[name][0]) for name in usual}
        if "schedule" not in rows:
            # The schedule that keeps fewest micro-batches in flight, of those that this PP can have.
            order = [index_of("schedule", name) for name in LEANEST]
            rank = np.array([order.index(int(schedule)) for schedule in parts.pipe["schedule"]])
            best = np.lexsort((parts.pipe["vpp"], rank, parts.pipe["pp"]))
            pp, first = np.unique(parts.pipe["pp"][best], return_index=True)
            chosen = best[first][np.searchsorted(pp, rows["pp"])]
            columns |= {name: parts.pipe[name][chosen] for name in ("vpp", "schedule")}
        if len(space["cp_kind"]) > 1:
            columns["cp_kind"] = np.full(size, FREE)
        columns |= self._freely_spread(rows) | rows
        return self._best_held(self.proposer.usual_placement(columns), self._least_memory)

    @cached_property
    def _several(self) -> tuple[str, ...]:
        """Choices that are held at several values, of which none is the leanest or the fastest by its name."""
        space = self.proposer.space
        words = ("recompute", "precision", "ep_overlap", *ON_REQUEST)
        return tuple(name for name in words if name in space.fixed and len(space[name]) > 1)

    def _best_held(self, columns: Columns, figure: Callable[[Columns], Floats]) -> Columns:
        """The columns, with those held values of `_several` that they lack of which each row's figure is least."""
        names = [name for name in self._several if name not in columns]
        if not names:
            return columns
        held = np.array(list(product(*(self.proposer.space[name] for name in names))), dtype=np.int64)
        each = [dict(zip(names, np.repeat(values[:, None], count(columns), axis=1), strict=True)) for values in held]
        best = held[np.argmin([figure(columns | one) for one in each], axis=0)]
        return columns | {name: best[:, place] for place, name in enumerate(names)}

    def _spread(self, rows: Columns, parts: Parts, ranking: Ranking) -> tuple[Columns, Floats]:
        """Rows with their experts spread in every way that can fit and enter the ranking, each with a bound."""
        rows = self.proposer.spread(rows)
        if not count(rows):
            return rows, np.empty(0)
        bound = self.objective.value(self._least_seconds(rows, parts), devices_of(rows), rows["global_batch"])
        fast = bound <= self._threshold(ranking)
        rows, bound = take(rows, fast), bound[fast]
        if not count(rows):
            return rows, bound
        fits = self._can_fit(rows, parts)
        return take(rows, fits), bound[fits]

    def _expand(self, rows: Columns, parts: Parts, ranking: Ranking) -> None:
        """Evaluate all layouts of the rows under the usual placement, then the promising ones under the others."""
        proposer = self.proposer
        piped = self._hopeful(proposer.piped(rows, parts), parts, ranking)
        recomputed = self._hopeful(proposer.recomputed(piped), parts, ranking)
        usual = proposer.sharded(recomputed, parts)
        if not count(usual):
            return
        estimates = self._estimate(usual)
        fits = self._take_in(usual, estimates.sec_per_it, estimates.mem_gib, ranking)
        # What goes over links that another placement, or another part of the replicas, may shorten.
        quiet = estimates.sec_per_it - sum(estimates.parts[name] for name in ("pp", "dp", "cp", "ep"))
        if PLACEMENTS[self.proposer.space["placement"][0]][0] != "tp":
            quiet = quiet - estimates.parts["tp"]  # else no other placement keeps more of a TP group inside a node
        devices = devices_of(usual)
        hopeful = fits & (self.objective.value(quiet, devices, usual["global_batch"]) <= self._threshold(ranking))
        # Where its ranks are does not change what a layout holds.
        self._place(take(usual, hopeful), estimates.mem_gib[hopeful], ranking)
        if proposer.parts_share:
            gains = hopeful & (estimates.parts["dp"] > LEAST_GAIN * estimates.sec_per_it)
            hybrid = proposer.shared_by_parts(take(usual, gains))
            if count(hybrid):
                self._take_in(hybrid, self._seconds(hybrid), self._memory(hybrid), ranking)

    def _place(self, rows: Columns, memory: Floats, ranking: Ranking) -> None:
        """Evaluate rows under the placements that differ from the usual one."""
        placed = self.proposer.placements(rows | {"row": np.arange(count(rows))})
        placed = take(placed, placed["placement"] != self.proposer.space["placement"][0])
        held = memory[placed.pop("row")]
        if count(placed):
            self._take_in(placed, self._seconds(placed), held, ranking)

    def _hopeful(self, rows: Columns, parts: Parts, ranking: Ranking) -> Columns:
        """Partial layouts that can still fit and enter the ranking, whatever is chosen besides."""
        if count(rows):
            rows = take(rows, self._can_fit(rows, parts))
        if not count(rows):
            return rows
        # How replicas agree, and over which links, is not chosen yet.
        quiet = self._fastest(rows, parts, stages_many)
        value = self.objective.value(quiet * CHOICE_SLACK, devices_of(rows), rows["global_batch"])
        return take(rows, value <= self._threshold(ranking))

    def _can_fit(self, rows: Columns, parts: Parts) -> Bools:
        """Whether the leanest layout that each row can become fits."""
        lean = {"recompute": self._most, "recompute_every": min(self.proposer.space["recompute_every"])}
        memory = self._least_memory(self._leanest(self._with_defaults(rows, lean), parts))
        return np.asarray(memory <= self._limit(rows))

    def _fastest(self, rows: Columns, parts: Parts, figure: Callable[[Case, LayoutGrid], Floats]) -> Floats:
        """That figure of what computes least, of what rows can become; exchanges that may hide show nothing."""
        fast = {"recompute": self._least, "recompute_every": max(self.proposer.space["recompute_every"])}
        columns = self._leanest(self._with_defaults(rows, fast), parts)
        if len(self.proposer.space["ep_overlap"]) > 1 and "ep_overlap" not in rows:
            columns["dispatcher"] = np.full(count(rows), FREE)

        def seconds(chosen: Columns) -> Floats:
            return figure(self.bounding, self.proposer.grid(chosen))

        held = {name: values for name, values in columns.items() if name in rows or name not in self._several}
        return seconds(self._best_held(held, seconds))

    def _with_defaults(self, rows: Columns, usual: dict[str, int]) -> Columns:
        """The rows, with a usual value in the columns that they do not have yet and of which none is held."""
        lacking = {name: value for name, value in usual.items() if name not in self._several}
        return {name: np.full(count(rows), value) for name, value in lacking.items()} | rows

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
            found = take(rows, chosen), value[chosen], seconds[chosen], memory[chosen]
            ranking.merge(*found, objective=self.objective, top=self.top)
        unfit = ~fits & met
        ranking.note_unfit(take(rows, unfit), value[unfit], (memory / limit)[unfit])
        return fits

    def _threshold(self, ranking: Ranking) -> float:
        """The value that a layout must not exceed to enter the ranking."""
        last = min(self.within, float(ranking.value[-1]) if len(ranking.value) >= self.top else np.inf)
        # By simulation layouts may miss a limit that they meet by the closed form, and others take their place.
        if self.objective.limited or len(ranking.value) < self.shown:
            return last
        return min(last, ranking.value_of_kind(self.shown) * BEHIND)

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


def _unusual_means(rows: Columns) -> Ints:
    """How many choices of each layout are at a value that is not plain."""
    unusual = np.zeros(count(rows), dtype=np.int64)
    for choice in CHOICES:
        if choice.plain:
            unusual += ~among(rows[choice.name], [choice.index(value) for value in choice.plain])
    return unusual


def _unevenness(grid: LayoutGrid) -> Ints:
    """How far the stages of each layout are from equal ones that the software makes by itself: 0, 1, or 2 for others.

    The first and the last may have fewer layers, for what stands before and behind the layers.
    """
    inner = [len(set(split.layers[1:-1])) > 1 for split in grid.splits.splits]
    return np.asarray(2 * (grid.split != STACK_SPLIT) | np.array(inner, dtype=np.int64)[grid.split_row])


def _smallest_batch(batch: Columns) -> Columns:
    """The smallest micro-batch of each DP, in order of DP."""
    order = np.lexsort((batch["mbs"], batch["dp"]))
    _, first = np.unique(batch["dp"][order], return_index=True)
    return take(batch, order[first])
