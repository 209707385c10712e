"""Candidates: every valid layout, in stages that grow only from what is valid so far.

Axes first (TP; PP with its virtual stages and schedule; DP with its micro-batch; ZeRO with its
data-parallel kind), then degrees together, then the choices that go with them. Of layouts that
are the same run under two names only one is proposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property, partial

import numpy as np

from trimaran.cost.grid import STACK_SPLIT, Bools, Ints, LayoutGrid, among, distinct
from trimaran.layout.axes import DEGREES, PLACEMENTS, devices_of
from trimaran.layout.axis_rules import OFFLOADED_BY_ZERO
from trimaran.layout.choices import APART, CHOICE, ON_REQUEST, index_of, usual_chunks
from trimaran.layout.rules import RULES
from trimaran.layout.stages import even_split, most_stages, stack_split, weighted_split
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.operators.counts import head_in_layers
from trimaran.planner.search.batches import batch_of
from trimaran.planner.search.settings import PlanSettings
from trimaran.planner.search.sieve import Columns, Sieve, count, cross, join, take
from trimaran.planner.search.space import Space

# Degrees of data parallelism up to here are all asked about, above only likely ones.
ALL_PROPOSED = 4096
# Combinations that one rule is asked about before a search, where it refuses them all: at most a second.
MOST_ASKED = 65536
_NONE, _INTERLEAVED = index_of("schedule", "none"), index_of("schedule", "interleaved")
# How many chunks a rank may have under each schedule but the interleaved one.
_CHUNKS = {index: (usual_chunks(word),) for index, word in enumerate(CHOICE["schedule"].words)}
_PIPE = frozenset({"pp", "vpp", "schedule"})
_ZERO = frozenset({"zero_stage", "dp_kind", "shard"})
_EXPERTS = ("ep", "etp", "dispatcher")
_IN_NODE = -1


@dataclass(frozen=True)
class Parts:
    """Valid values of each axis alone: (PP, VPP, schedule), (DP, MBS, global batch), (ZeRO, kind), the other axes."""

    alone: tuple[Columns, ...]
    pipe: Columns
    batch: Columns
    zero: Columns


class Proposer:
    """Proposes the candidates of one question and passes them through its sieve."""

    def __init__(self, space: Space, sieve: Sieve, settings: PlanSettings, devices: int) -> None:
        self.space, self.sieve, self.settings, self.devices = space, sieve, settings, devices
        self.workload: Workload = sieve.workload
        self.cluster: Cluster = sieve.cluster
        self.stack: Stack = sieve.stack

    def check_fixed(self) -> None:
        """Raises TrimaranError where a rule refuses what is fixed, whatever is chosen beside it.

        So that no search has to find it out. Rules on products of degrees are left to the search, as are those that
        read more than MOST_ASKED combinations.
        """
        space, sieve = self.space, Sieve(self.workload, self.cluster, self.stack)
        for rule in RULES:
            reads = [term for term in rule.reads if term not in APART]
            if space.fixed.isdisjoint(reads) or not all(space.values.get(term) for term in reads):
                continue
            # of the other fields, what no rule refuses of each alone
            alone = {term: self._proposed(term) for term in reads}
            parts = [part if term in space.fixed else sieve.keep(part) for term, part in alone.items()]
            if 0 < math.prod(map(count, parts)) <= MOST_ASKED and (sentence := sieve.refusal(rule, cross(*parts))):
                raise TrimaranError(f"no layout is valid: {sentence}")

    def parts(self) -> Parts:
        """The axes, each passed through the rules that read it alone."""
        shard = () if self.parts_share else self.space.unusual("shard")
        zero = self.sieve.keep(self._proposed("zero_stage", "dp_kind", *shard))
        alone = tuple(self.sieve.keep(self._proposed(axis)) for axis in DEGREES if axis not in ("pp", "dp"))
        return Parts(alone, self._pipe(), self._batch(), zero)

    def degrees(self, parts: Parts) -> Columns:
        """All degrees on as many devices as are allowed, and no more than the cluster has."""
        degrees = cross(*parts.alone, _unique(parts.pipe, "pp"), _unique(parts.batch, "dp"))
        devices = devices_of(degrees)
        allowed = devices <= self.devices
        if self.settings.device_counts:
            allowed &= np.isin(devices, self.settings.device_counts)
        return self.sieve.keep(take(degrees, allowed))

    def with_batches(self, degrees: Columns, parts: Parts) -> Columns:
        """Degrees with every micro-batch that their DP allows, and the global batch it makes."""
        return join(degrees, parts.batch, "dp")

    def piped(self, rows: Columns, parts: Parts) -> Columns:
        """(TP, PP, DP, MBS) rows with their virtual stages, schedules and stage splits: valid ones, no duplicates."""
        piped = self.sieve.keep(join(rows, parts.pipe, "pp"), known=(frozenset(rows), _PIPE))
        return self.splits(piped)

    def splits(self, rows: Columns) -> Columns:
        """Each row under every kind of stage split that differs from the others."""
        rows = cross(rows, {"split": np.array(self.space.split, dtype=np.int64)})
        if len(self.space.split) == 1:
            return rows
        return take(rows, (rows["split"] == STACK_SPLIT) | ~self._same_split(rows))

    def recomputed(self, piped: Columns) -> Columns:
        """Piped rows with recompute, sequence parallelism and precision: valid ones, no duplicates."""
        space = self.space
        others = self._proposed(
            "recompute", "recompute_every", "sequence_parallel", "precision", *space.unusual("ep_overlap", *ON_REQUEST)
        )
        if len(space["recompute_every"]) > 1:
            full = others["recompute"] == index_of("recompute", "full")
            others = take(others, full | (others["recompute_every"] == min(space["recompute_every"])))
        return self.sieve.keep(cross(piped, others), known=(frozenset(piped),))

    def spread(self, rows: Columns) -> Columns:
        """Rows with the ranks of their experts and the way that tokens come to them: valid ones, no duplicates."""
        if not self.workload.model.experts:
            return rows
        several = cross(rows, self._proposed(*_EXPERTS))
        return self.sieve.keep(take(several, ~self._same_exchange(several)), known=(frozenset(rows),))

    def _same_exchange(self, rows: Columns) -> Bools:
        """Rows whose experts are laid out as another's: nothing is sent under EP 1, and an ETP of 0 is as TP."""
        space = self.space
        same = np.zeros(count(rows), dtype=np.bool_)
        if "dispatcher" in rows and "dispatcher" not in space.fixed:
            same |= (rows.get("ep", np.array(1)) == 1) & (rows["dispatcher"] != space["dispatcher"][0])
        if "etp" in rows and len(space["etp"]) > 1:
            same |= (rows["etp"] == 0) & among(rows["tp"], space["etp"])
        return same

    def sharded(self, recomputed: Columns, parts: Parts) -> Columns:
        """Recomputed rows with ZeRO, its data-parallel kind and the way of sharing out sequences, placed as usual.

        All but shards of a part of the replicas; valid ones, no duplicates.
        """
        rows = cross(recomputed, parts.zero, self._proposed(*self.space.unusual("cp_kind")))
        if "cp_kind" in rows and "cp_kind" not in self.space.fixed:
            # A whole sequence on a rank is shared out in no way.
            rows = take(rows, (rows["cp"] > 1) | (rows["cp_kind"] == self.space["cp_kind"][0]))
        if "zero_stage" not in self.space.fixed and "dp_kind" not in self.space.fixed:
            # A lone replica shards nothing, but may offload by what shards.
            plain = np.logical_and.reduce([rows[name] == values[0] for name, values in parts.zero.items()])
            if "offload" in rows:
                by_zero = among(rows["offload"], [index_of("offload", word) for word in OFFLOADED_BY_ZERO])
                plain |= by_zero & among(rows["zero_stage"], self.stack.lone_zero_stages)
            rows = take(rows, (rows["dp"] * rows["cp"] > 1) | plain)
        if self.parts_share:
            rows["shard"] = np.zeros(count(rows), dtype=np.int64)
        return self.sieve.keep(self.usual_placement(rows), known=(frozenset(recomputed), _ZERO))

    @property
    def parts_share(self) -> bool:
        """Whether a part of the replicas may share out what ZeRO shards, by the search's own choice."""
        return "shard" not in self.space.fixed and len(self.space["shard"]) > 1

    def shared_by_parts(self, rows: Columns) -> Columns:
        """Each row under every part of its replicas that shares out what ZeRO shards: valid ones.

        With what shares out each replica it fills 1, 4, 16, ... nodes: less would gather no faster and hold more.
        """
        parts = self._proposed("shard")
        plain = {name: values for name, values in rows.items() if name != "shard"}
        hybrid = cross({"row": np.arange(count(rows))}, take(parts, parts["shard"] > 0))
        hybrid = take(plain, hybrid["row"]) | {"shard": hybrid["shard"]}
        nodes = hybrid["shard"] * hybrid["cp"] * hybrid["tp"] / self.cluster.devices_per_node
        fills = np.isin(nodes, [4**power for power in range(self.devices.bit_length())])
        hybrid = take(hybrid, fills & (hybrid["shard"] < hybrid["dp"]) & (hybrid["zero_stage"] > 0))
        return self.sieve.keep(hybrid, known=(frozenset(plain),))

    def placements(self, rows: Columns) -> Columns:
        """Each row under every order of the axes over the nodes that differs from the others: valid ones."""
        placed = join(rows | {"shape": self._placed_shape(rows)}, self._orders, "shape")
        del placed["shape"]
        return self.sieve.keep(placed, known=(frozenset(rows) - {"placement"},))

    def usual_placement(self, rows: Columns) -> Columns:
        """Each row under the first placement that the space allows."""
        return rows | {"placement": np.full(len(rows["dp"]), self.space["placement"][0], dtype=np.int64)}

    def grid(self, rows: Columns) -> LayoutGrid:
        """The rows as a LayoutGrid; choices that they do not hold yet have Layout's defaults."""
        return LayoutGrid.build(self.workload, self.stack, **rows)

    def _proposed(self, *choices: str) -> Columns:
        """Every combination of the values that the space has for the choices."""
        return cross(*({name: np.array(self.space[name], dtype=np.int64)} for name in choices))

    def _pipe(self) -> Columns:
        space, most = self.space, most_stages(self.stack, self.workload.model.layers)
        rows = []
        for pp in space["pp"]:
            if pp == 1:
                # One stage has no schedule, whatever a pipeline's is fixed to.
                rows += [(1, vpp, _NONE) for vpp in space.values.get("vpp", (1,))]
                continue
            for schedule in space["schedule"]:
                if schedule == _NONE:
                    continue
                usual = tuple(range(2, most // pp + 1)) if schedule == _INTERLEAVED else _CHUNKS[schedule]
                rows += [(pp, vpp, schedule) for vpp in space.values.get("vpp", usual)]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return self.sieve.keep({"pp": table[:, 0], "vpp": table[:, 1], "schedule": table[:, 2]})

    def _batch(self) -> Columns:
        """DP, micro-batch and the global batch that they make: the workload's, or the nearest within tolerance."""
        # What neither a micro-batch of 1 nor a DP of 1 can do, no larger one can: DP x MBS only grows.
        dps = self._likely(np.array(self.space["dp"], dtype=np.int64))
        dp = self._with_global_batch({"dp": dps, "mbs": np.ones(len(dps), np.int64)})
        mbs = self._with_global_batch({"dp": np.ones(len(self.space["mbs"]), np.int64)} | self._proposed("mbs"))
        dp, mbs = self.sieve.keep(dp), self.sieve.keep(mbs)
        pairs = cross({"dp": dp["dp"]}, {"mbs": mbs["mbs"]})
        # Pairs above the largest batch are hopeless, and under a tolerance far too many to ask about.
        largest = self.workload.global_batch * (1.0 + self.settings.gbs_tolerance)
        pairs = take(pairs, pairs["dp"] * pairs["mbs"] <= largest) if "mbs" not in self.space.fixed else pairs
        return self.sieve.keep(self._with_global_batch(pairs))

    def _likely(self, values: Ints) -> Ints:
        """Large degrees only where the global batch is near a multiple; small ones all, so that rules can refuse."""
        asked, tolerance = self.workload.global_batch, self.settings.gbs_tolerance
        near = np.abs(np.rint(asked / values) * values - asked) <= tolerance * asked
        return values[near | (values <= ALL_PROPOSED)]

    def _with_global_batch(self, pairs: Columns) -> Columns:
        if not self.settings.gbs_tolerance:
            return pairs | {"global_batch": np.full(len(pairs["dp"]), self.workload.global_batch, dtype=np.int64)}
        first, inverse = distinct([pairs["dp"] * pairs["mbs"]])
        products = pairs["dp"][first] * pairs["mbs"][first]
        batches = np.array(
            [batch_of(self.workload, int(n), self.settings.gbs_tolerance) for n in products], dtype=np.int64
        )
        return pairs | {"global_batch": batches[inverse]}

    def _same_split(self, rows: Columns) -> Bools:
        """Where the stack's own split and the other one that is proposed are the same."""
        layers, stack = self.workload.model.layers, self.stack
        head = cache(partial(head_in_layers, stack.trained(self.workload.model), self.workload.seq_len))
        stages = rows["pp"] * rows["vpp"]
        first, inverse = distinct([rows["tp"], stages])
        same = []
        for tp, several in zip(rows["tp"][first].tolist(), stages[first].tolist(), strict=True):
            if several > layers:
                same.append(True)  # ends that hold no layers: there is one such split
                continue
            weighted = weighted_split(layers, several, head(tp), stack.bare_ends)
            other = even_split(layers, several) if stack.head_weighted_stages else weighted
            same.append(stack_split(stack, layers, several, partial(head, tp)) == other)
        return np.array(same, dtype=np.bool_)[inverse]

    @cached_property
    def _orders(self) -> Columns:
        """For every set of axes of more than one rank the first placement of each order of them, by its `shape`."""
        shapes, placements = [_IN_NODE], [self.space["placement"][0]]
        for shape in range(2 ** len(DEGREES)):
            active = {axis for bit, axis in enumerate(DEGREES) if shape >> bit & 1}
            orders: dict[tuple[str, ...], int] = {}
            for placement in self.space["placement"]:
                orders.setdefault(tuple(axis for axis in PLACEMENTS[placement] if axis in active), placement)
            shapes += [shape] * len(orders)
            placements += orders.values()
        return {"shape": np.array(shapes), "placement": np.array(placements, dtype=np.int64)}

    def _placed_shape(self, rows: Columns) -> Ints:
        """The set of axes of more than one rank as bits, or _IN_NODE where all ranks share a node."""
        shape = sum((rows[axis] > 1).astype(np.int64) << bit for bit, axis in enumerate(DEGREES))
        return np.where(devices_of(rows) <= self.cluster.devices_per_node, _IN_NODE, shape)


def _unique(columns: Columns, name: str) -> Columns:
    return {name: np.unique(columns[name])}
