"""PlacedCost: one layout's iteration with each rank on a given device of nodes and links that differ.

Every replica's pipeline is played as it is, its own micro-batches at the speed of its nodes and links; every stage's
replicas agree on gradients over a ring of theirs, which its slowest link paces. Under hybrid sharding those that share
out states have rings, and those that hold copies of a shard have others: the slowest of each paces the stage. Its
agreement follows its own last backward, so an iteration ends with the stage that is last with both. Many placements of
a layout have pipelines and rings in common: each kind is computed once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property, reduce

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import IterationCost
from trimaran.cost.effects.gradient_traffic import ends_sum_embedding, exposed_time, tied_gradient_bytes
from trimaran.cost.effects.time_effects import time_parts
from trimaran.cost.grid import Floats, Ints, LayoutGrid
from trimaran.cost.memory.stage import end_layers, expert_parameters, parameters
from trimaran.cost.network import Network
from trimaran.cost.pipeline.closed_form import pipeline_runs, silent_time
from trimaran.cost.pipeline.lockstep import ends
from trimaran.cost.pipeline.runs import PipelineRuns
from trimaran.cost.placed.cells import lanes_of, standing_cells
from trimaran.cost.placed.hops import hops
from trimaran.cost.placed.kind_of_node import KindOfNode, joined_by
from trimaran.cost.placed.rings import Ring, Rings, StageIteration, rings_along
from trimaran.cost.placed.topology import Topology
from trimaran.cost.similar import time_scales
from trimaran.cost.stage_work import micro_batch, send_times, stage_work
from trimaran.cost.states import sent_gradient_bytes
from trimaran.layout.layout import Layout
from trimaran.nouns.hardware.link import Link

# Of a pipeline that is played: the kind of node of each stage, rate and delay of the sends between them, and its
# micro-batches.
PipelineKey = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...], int]
# What a rank is busy with, by cause: the rest of an iteration are waits, and what follows the pipeline.
BUSY = ("forward", "backward", "recompute", "head", "tp", "ep", "cp")
_AFTER = ("optimizer", "offload", "overhead")
# Of a pipeline's stages: the first, any between the ends, the last.
FIRST, MIDDLE, LAST = range(3)


class PlacedCost:
    """Seconds of a layout by where its cells stand: a cell is a replica's stage, the ranks of one TP x CP group."""

    def __init__(self, case: Case, layout: Layout) -> None:
        self.case, self.layout = case, layout
        self.topology = Topology.of(case.cluster)
        self.grid = LayoutGrid.from_layouts([layout], case.workload, case.stack)
        self.cell_ranks = layout.tp * layout.cp
        most = int(self.grid.micro_batches[0])
        # micro-batches of each replica, shape (dp,)
        self.batches: Ints = np.array(layout.replica_batches or (most,) * layout.dp)
        # Groups of nodes, and behind them groups over whose nodes a cell of ranks is spread, with the link it has then.
        self._spread: list[tuple[int, Link]] = []
        self._kinds: dict[int, KindOfNode] = {}
        self._sends: dict[tuple[frozenset[int], float, float], tuple[float, float]] = {}
        self._ends: dict[PipelineKey, Floats] = {}
        self._agreed: dict[tuple[int, int, Rings], float] = {}
        self._rounds: dict[tuple[int, int, Ring, bool], float] = {}
        # Parts of replicas that hold the same shards, and replicas that share out states: of one of them, or of both.
        self.copies, self.sharers = int(self.grid.size("replicate")[0]), int(self.grid.size("shard")[0])

    @cached_property
    def rank_cells(self) -> Ints:
        """The cell of each rank, `replica * pp + stage`, shape (ranks,)."""
        layout = self.layout
        replica, stage = (
            np.array([layout.coordinate(axis, rank) for rank in range(layout.devices)]) for axis in ("dp", "pp")
        )
        return np.asarray(replica * layout.pp + stage)

    def cells(self, devices: Ints) -> tuple[Ints, Ints]:
        """The nodes of the cells whose ranks stand on `devices`, by rank, and the kind of node of each cell, (dp, pp).

        A cell whose ranks could share a node and do not, or are of several groups, is a kind of its own. Nodes have the
        shape (dp, pp) or, where there is such a cell, one of these for each rank of a cell, (ranks, dp, pp).
        """
        standing = standing_cells(self.topology, devices, self.rank_cells)
        groups = [self._slowest(set(self.topology.kind_of[list(each)].tolist())) for each in standing.groups]
        kinds = [
            group if link is None else self._spread_over(group, link)
            for group, link in zip(groups, standing.links, strict=True)
        ]
        shape = self.layout.dp, self.layout.pp
        return standing.nodes.reshape(-1, *shape)[() if standing.spread else 0], np.array(kinds).reshape(shape)

    def seconds(self, nodes: Ints, kinds: Ints | None = None) -> float:
        """Seconds of an iteration whose cells stand on `nodes`, as `cells` has them."""
        return self.parts(nodes, kinds)[1]

    def of_cells(self, nodes: Ints, kinds: Ints | None = None) -> tuple[Floats, Floats]:
        """Seconds until each cell has done its last backward, shape (dp, pp), and of each stage's agreement, (pp,)."""
        kinds = self._plain_kinds(nodes) if kinds is None else kinds
        return self._pipelines(nodes, kinds), self._agreements(nodes, kinds)

    def score(self, nodes: Ints) -> tuple[float, float]:
        """What a search makes small: seconds to the last agreement, and those of cells on average, for equal ones."""
        done, agreed = self.of_cells(nodes)
        return float((done + agreed).max()), float(done.max(axis=1).mean() + agreed.mean())

    def parts(self, nodes: Ints, kinds: Ints | None = None) -> tuple[dict[str, float], float]:
        """Seconds of every part of an iteration, and their sum."""
        kinds = self._plain_kinds(nodes) if kinds is None else kinds
        done, agreed = self.of_cells(nodes, kinds)
        each = self._busy(kinds) * self.batches[:, None]
        pace = self._kind(int(kinds.ravel()[each.argmax()]))
        scale = self.scale
        flat = sum(float(pace.parts[name][0]) for name in BUSY)
        pipeline = float(done.max()) * scale
        busy = pipeline if self.layout.pp == 1 else float(each.max()) * scale
        seconds = {name: float(pace.parts[name][0]) * busy / flat for name in BUSY}
        waits, slowest = max(pipeline - busy, 0.0), int(done.max(axis=1).argmax())
        silent = self._silent(kinds[slowest], int(self.batches[slowest])) * scale
        sends = min(waits, max(pipeline - silent, 0.0))
        seconds |= {"pp": sends, "bubble": waits - sends, "dp": float((done + agreed).max()) * scale - pipeline}
        most = {kind: int(self.batches[(kinds == kind).any(axis=1)].max()) for kind in np.unique(kinds).tolist()}
        used = [self._after(kind, batches) for kind, batches in most.items()]
        seconds |= {name: max(float(parts[name][0]) for parts in used) for name in _AFTER}
        ordered = {name: seconds[name] for name in pace.parts}
        return ordered, reduce(float.__add__, ordered.values())

    def pipeline_seconds(self, kinds: Sequence[int], ways: Sequence[tuple[float, float]], batches: int) -> Floats:
        """When each rank of one pipeline has done its last backward, shape (pp,), on nodes of `kinds`.

        `ways` have rate (gigabit/s; 0: inside a node) and delay (microseconds) of the sends from each rank to the next.
        """
        rates, delays = tuple(rate for rate, _ in ways), tuple(late for _, late in ways)
        return self._played([(tuple(kinds), rates, delays, batches)])[0]

    def replica_seconds(self, nodes: Ints, batches: Sequence[int]) -> Floats:
        """Seconds until each replica's pipeline on `nodes` has done its last backward with so many micro-batches."""
        keys = self._pipeline_keys(nodes, self._plain_kinds(nodes), batches)
        return np.array([lasts.max() for lasts in self._played(keys)])

    def agreement_seconds(self, kind: int, stage: int, rings: Rings) -> float:
        """Seconds exposed of a stage's agreement over such rings, on nodes of a kind."""
        end = self._end(stage)
        key = (kind, end, rings._replace(ends=None) if end == MIDDLE else rings)
        if key not in self._agreed:
            self._agreed[key] = self._agreement(*key)
        return self._agreed[key]

    def fastest_kind(self) -> int:
        """The group whose nodes take least for a layer."""
        return min(range(len(self.topology.kinds)), key=lambda group: self._kind(group).layer_s)

    def _plain_kinds(self, nodes: Ints) -> Ints:
        """The kinds of cells that stand on one node each, or on whole ones of a group."""
        return np.asarray(self.topology.kind_of[self.topology.group_of[nodes]])

    def stage_seconds(self, kinds: Ints) -> tuple[Floats, Floats]:
        """Seconds of a micro-batch, forward and backward, on the slowest of each stage's `kinds`, shape (dp, pp).

        Of one layer, and of what the first and the last stage do besides, shape (pp,) each.
        """
        times = [self._kind(self._slowest(set(column))).work.times.alone() for column in kinds.T.tolist()]
        layer = np.array([float((each.forward + each.backward)[0]) for each in times])
        ends = np.zeros(len(times))
        ends[0] += float((times[0].first_forward + times[0].first_backward)[0])
        ends[-1] += float((times[-1].last_forward + times[-1].last_backward)[0])
        return layer, ends

    @property
    def computed(self) -> int:
        """Pipelines and rings of which no other was as they are: what searching has cost so far."""
        return len(self._ends) + len(self._agreed)

    @cached_property
    def scale(self) -> float:
        """What measured runs say that everything takes longer."""
        return float(np.max(time_scales(self.case, self.grid)))

    @property
    def message_bits(self) -> float:
        """Bits of the hidden state of one micro-batch."""
        return 8.0 * float(self._kind(0).message[0])

    @property
    def ring_bits(self) -> float:
        """Bits that each replica of a stage sends to the next in an agreement: the gradients, summed and sent out."""
        sent = float(sent_gradient_bytes(self.grid, self.case.stack)[0])
        return 2.0 * 8.0 * sent * max(float(held[0]) for held in self._held)

    def _spread_over(self, group: int, between: Link) -> int:
        if (group, between) not in self._spread:
            self._spread.append((group, between))
        return len(self.topology.kinds) + self._spread.index((group, between))

    def _kind(self, kind: int) -> KindOfNode:
        """What the stages do on nodes of a group, or spread over such nodes."""
        if kind not in self._kinds:
            groups = len(self.topology.kinds)
            group, between = self._spread[kind - groups] if kind >= groups else (kind, None)
            cluster, slower = self.topology.kinds[group], float(self.topology.slowdown[group])
            if between is not None:
                apart = {"inter": between, "devices_per_node": 1, "nodes": cluster.devices}
                cluster = cluster.model_copy(update=apart)
            if self.case.model.experts:  # tokens go to replicas anywhere
                cluster = cluster.model_copy(update={"inter": self.case.cluster.inter})
            case = self.case.on_nodes(cluster)
            work, parts = stage_work(case, self.grid), time_parts(IterationCost(case, self.grid))
            if slower != 1.0:
                work = work.scaled(np.array([slower]))
                parts |= {name: parts[name] * slower for name in (*BUSY, *_AFTER)}
            runs = pipeline_runs(self.grid, work.times)
            self._kinds[kind] = KindOfNode(case, work, runs, micro_batch(case, self.grid).message, parts, slower)
        return self._kinds[kind]

    def _taking(self, batches: int) -> LayoutGrid:
        """The layout whose replicas all take so many micro-batches."""
        same = batches == int(self.grid.micro_batches[0])
        return self.grid if same else replace(self.grid, most_batches=np.array([batches]))

    def _after(self, kind_id: int, batches: int) -> dict[str, Floats]:
        """Seconds of what follows the pipeline on nodes of a kind, of replicas that take so many micro-batches."""
        kind, grid = self._kind(kind_id), self._taking(batches)
        if grid is self.grid:
            return kind.parts
        parts = time_parts(IterationCost(kind.case, grid))
        return {name: parts[name] * kind.slower for name in _AFTER}

    def _pipelines(self, nodes: Ints, kinds: Ints) -> Floats:
        """When each cell has done its last backward, shape (dp, pp)."""
        return np.stack(self._played(self._pipeline_keys(nodes, kinds, self.batches.tolist())))

    def _played(self, keys: Sequence[PipelineKey]) -> list[Floats]:
        """When each rank of each pipeline has done its last backward."""
        new = [key for key in dict.fromkeys(keys) if key not in self._ends]
        if new:
            lasts = ends(PipelineRuns.joined([self._run(key[0], self._sent(*key[:3]), key[3]) for key in new]))
            lasts = np.maximum(lasts, np.array([self._crowded(key[0], key[3]) for key in new])[:, None])
            self._ends |= dict(zip(new, lasts, strict=True))
        return [self._ends[key] for key in keys]

    def _pipeline_keys(self, nodes: Ints, kinds: Ints, batches: Sequence[int]) -> list[PipelineKey]:
        lanes, streams = lanes_of(nodes, self.cell_ranks)
        turns = np.broadcast_to(np.arange(nodes.shape[-1]), lanes.shape)
        way = hops(self.topology, lanes, np.roll(lanes, -1, axis=-1), streams, turns)
        # The last rank sends to the first where ranks have chunks in turn.
        stages = kinds.shape[1]
        last = stages if self.layout.vpp > 1 and not self.grid.folded[0] else stages - 1
        # what a cell sends is there when the last of its ranks has it
        rates = np.where(way.crosses.any(axis=0), way.gbps.min(axis=0), 0.0)
        gbps, delay = rates[:, :last], way.delay_us.max(axis=0)[:, :last]
        return [
            (tuple(of), tuple(rate), tuple(late), taken)
            for of, rate, late, taken in zip(kinds.tolist(), gbps.tolist(), delay.tolist(), batches, strict=True)
        ]

    def _sent(self, kinds: Sequence[int], rates: Sequence[float], delays: Sequence[float]) -> list[tuple[float, float]]:
        """Seconds of the send from each rank to the next."""
        ways = zip(kinds, [*kinds[1:], kinds[0]], rates, delays, strict=False)
        sent = [self._send(frozenset((here, there)), rate, late) for here, there, rate, late in ways]
        return [*sent, *[(0.0, 0.0)] * (len(kinds) - len(sent))]

    def _send(self, between: frozenset[int], gbps: float, delay_us: float) -> tuple[float, float]:
        """Seconds that a send between cells of two kinds holds its link, and until it arrives; 0 gbps: inside a node.

        Activations go one way and gradients the other: what the slower side does with what arrives counts.
        """
        key = between, gbps, delay_us
        if key not in self._sends:
            link = Link(bandwidth_gbps=gbps, latency_us=delay_us) if gbps else None
            kinds, way = [self._kind(kind) for kind in between], np.array([gbps > 0])
            each = [send_times(kind.case, self.grid, kind.message, way, np.ones(1), link) for kind in kinds]
            held, arrives = (float(self.grid.filled[0] * max(seconds)[0]) for seconds in zip(*each, strict=True))
            self._sends[key] = held, arrives
        return self._sends[key]

    def _run(self, kinds: Sequence[int], sent: Sequence[tuple[float, float]], batches: int) -> PipelineRuns:
        """The pipeline of so many micro-batches on nodes of `kinds`, each rank's send to the next as long as `sent`."""
        runs = [self._kind(int(kind)).runs for kind in kinds]

        def stages(name: str) -> Floats:
            return np.stack([getattr(run, name)[:, :, stage] for stage, run in enumerate(runs)], axis=2)

        held, arrives = (np.array([[seconds[way] for seconds in sent]]) for way in (0, 1))
        return replace(
            runs[0],
            micro_batches=np.array([batches]),
            forward_s=stages("forward_s"),
            backward_s=stages("backward_s"),
            weight_s=stages("weight_s"),
            held_s=held,
            arrives_s=arrives,
        )

    def _crowded(self, kinds: Sequence[int], batches: int) -> float:
        """Seconds in which cores that stages share are done with all their work, links that take no time; 0 without."""
        times = [self._kind(int(kind)).unslowed for kind in set(kinds)]
        shared = [each for each in times if float(each.crowding[0]) > 1.0]
        return max((float(silent_time(self._taking(batches), each)[0]) for each in shared), default=0.0)

    def _agreements(self, nodes: Ints, kinds: Ints) -> Floats:
        """Seconds in which the replicas of each stage agree on its gradients, shape (pp,)."""
        stages, one_ring = nodes.shape[-1], self.copies == 1 or self.sharers == 1
        slowest = [self._slowest(set(column)) for column in kinds.T.tolist()]
        # ranks of a cell that share a sequence are on the same ring
        lanes, streams = lanes_of(nodes, self.layout.tp)
        parts = lanes if one_ring else lanes.reshape(-1, self.copies, self.sharers, stages)
        along = enumerate(zip(slowest, rings_along(self.topology, parts, -2, streams), strict=True))
        shared = [self._slowest_ring(kind, stage, each, sharing=self.sharers > 1) for stage, (kind, each) in along]
        if one_ring:
            rings = [Rings(ring, ring) for ring in shared]
        else:
            # each rank of a cell has a ring of its own to those that hold the same shard
            lanes, streams = lanes_of(nodes, self.cell_ranks)
            parts = lanes.reshape(-1, self.copies, self.sharers, stages)
            copied = rings_along(self.topology, parts, -3, streams)
            each = enumerate(zip(slowest, shared, copied, strict=True))
            rings = [
                Rings(of_sharers, self._slowest_ring(kind, stage, of_copies, sharing=False))
                for stage, (kind, of_sharers, of_copies) in each
            ]
        if self.sums_embedding:
            ends = self._slowest_ends(nodes)
            rings = [ring._replace(ends=ends) for ring in rings]
        ways = enumerate(zip(slowest, rings, strict=True))
        return np.array([self.agreement_seconds(kind, stage, both) for stage, (kind, both) in ways])

    @cached_property
    def sums_embedding(self) -> bool:
        """Whether the first and the last stage sum the gradient of one embedding."""
        return bool(ends_sum_embedding(self.case, self.grid)[0])

    def _slowest_ends(self, nodes: Ints) -> Ring:
        """The way between the ends of a pipeline that takes longest for the gradient of the embedding they share."""
        lanes, streams = lanes_of(nodes, self.cell_ranks)
        pairs = np.swapaxes(lanes[..., [0, -1]], -1, -2)
        rings = dict.fromkeys(ring for found in rings_along(self.topology, pairs, -2, streams) for ring in found)
        return max(rings, key=self._ends_seconds) if len(rings) > 1 else next(iter(rings))

    def _ends_seconds(self, ring: Ring) -> float:
        """Seconds in which the two ends sum it."""
        case = self._kind(0).case
        size = tied_gradient_bytes(case, self.grid)
        return float(Network(case.cluster, case.calibration).all_reduce(size, ring.group(np.full(1, 2.0), 1))[0])

    def _slowest_ring(self, kind: int, stage: int, rings: Sequence[Ring], *, sharing: bool) -> Ring:
        """The ring that takes longest for a stage's gradients: whoever agrees over another waits for it."""
        if len(rings) == 1:
            return rings[0]
        return max(rings, key=lambda ring: self._round_seconds(kind, self._end(stage), ring, sharing=sharing))

    def _round_seconds(self, kind_id: int, end: int, ring: Ring, *, sharing: bool) -> float:
        """Seconds in which sharers scatter the gradients of a stage over a ring, or copies sum those of a shard."""
        key = (kind_id, end, ring, sharing)
        if key not in self._rounds:
            case = self._kind(kind_id).case
            network = Network(case.cluster, case.calibration)
            size = self._held[end] * sent_gradient_bytes(self.grid, case.stack)
            sharers = self.sharers * self.layout.cp
            if sharing:
                seconds = network.all_gather(size, ring.group(np.array([float(sharers)]), self.layout.cp))
            else:
                seconds = network.all_reduce(size / sharers, ring.group(np.array([float(self.copies)]), 1))
            self._rounds[key] = float(seconds[0])
        return self._rounds[key]

    def _agreement(self, kind_id: int, end: int, rings: Rings) -> float:
        """Seconds exposed of one agreement, at one of the ends of the pipeline or between them."""
        kind = self._kind(kind_id)
        case = joined_by(kind.case, rings.slowest)
        held, experts = self._held[end], self._experts_held[end]
        stage = StageIteration(case, self.grid, rings=rings, of_stage=held, experts_of_stage=experts, known=kind.work)
        return float(exposed_time(stage)[0])

    def _end(self, stage: int) -> int:
        """Stages that hold as much have the same number, which is that of their parameters in `_held`."""
        return FIRST if stage == 0 else LAST if stage == self.layout.pp - 1 else MIDDLE

    @cached_property
    def _held(self) -> list[Floats]:
        """Parameters of a rank of the first, of a middle and of the last stage."""
        shapes = end_layers(self.case.model, self.grid)
        return [parameters(self.case.model, self.case.stack, self.grid, shape) for shape in shapes]

    @cached_property
    def _experts_held(self) -> list[Floats | None]:
        """Those of them that are routed experts'; None where the model has none."""
        model = self.case.model
        shapes = end_layers(model, self.grid)
        return [expert_parameters(model, self.grid, shape) if model.experts else None for shape in shapes]

    def _slowest(self, kinds: Collection[int]) -> int:
        """The kind of node that takes longest for a layer."""
        if len(kinds) == 1:
            return next(iter(kinds))
        return max(sorted(kinds), key=lambda kind: self._kind(kind).layer_s)

    def _busy(self, kinds: Ints) -> Floats:
        """Seconds in which each cell computes for a micro-batch, shape (dp, pp)."""
        busy = np.zeros(kinds.shape)
        for kind in np.unique(kinds).tolist():
            runs = self._kind(kind).runs
            each = (runs.forward_s + runs.backward_s)[0].sum(axis=0)[: kinds.shape[1]]
            busy = np.where(kinds == kind, each, busy)
        return busy

    def _silent(self, kinds: Ints, batches: int) -> float:
        """Seconds of a pipeline on such nodes if its links took no time."""
        return float(ends(self._run(kinds.tolist(), [(0.0, 0.0)] * len(kinds), batches)).max())
