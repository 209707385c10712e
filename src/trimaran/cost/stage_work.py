"""What a rank of each pipeline stage does in one micro-batch, seconds, vectorised over layouts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Literal

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Bools, Floats, Ints, LayoutGrid, distinct, padded_vocab_of
from trimaran.cost.kernels import Rates, rates, slowdowns
from trimaran.cost.layers.accumulation import accumulation_time
from trimaran.cost.layers.hidden_exchange import behind_other_batch, behind_shared
from trimaran.cost.layers.layer_work import LayerWork, Shapes, layer_work
from trimaran.cost.layers.tensor_sums import TensorSums
from trimaran.cost.meetings import slowest_factor, waiting_factor
from trimaran.cost.network import Group, Network, group
from trimaran.cost.pipeline.closed_form import slowest_rank
from trimaran.cost.pipeline.stage_times import StageTimes
from trimaran.cost.states import GRADIENTS, element_bytes, expert_shards, gradient_bytes, shards
from trimaran.nouns.hardware.link import Link
from trimaran.operators.counts import head_in_layers

Phase = Literal["forward", "backward", "recompute", "once"]


@dataclass(frozen=True)
class StageWork:
    """What layers and ends cost (arrays over layouts, seconds per micro-batch), and their parts on the slowest rank.

    `layers` that rank holds, so many of them as are `dense_layers` with a `dense` MLP, where the model's others have a
    mixture of experts; `ends`, `tp_time` and `ep_time` are its head and embedding, its TP collectives and its
    exchanges of tokens, `cp_time` those of keys and values.
    """

    times: StageTimes
    rate: Rates
    layers: Floats
    layer: LayerWork
    ends: Floats
    tp_time: Floats
    ep_time: Floats
    cp_time: Floats | float
    dense_layers: Floats | float = 0.0
    dense: LayerWork | None = None

    def of_layers(self, phase: Phase, times: Floats | float = 1.0) -> Floats:
        """Seconds of a phase of all layers of the slowest rank, so many times."""
        all_alike = times * self.layers * getattr(self.layer, phase)
        if self.dense is None:
            return np.asarray(all_alike)
        differ = getattr(self.dense, phase) - getattr(self.layer, phase)
        return np.asarray(all_alike + times * self.dense_layers * differ)

    def scaled(self, filled: Floats) -> StageWork:
        """The mean over micro-batches of which the last is not full: each takes as long as it has sequences."""
        return replace(
            self,
            times=self.times.scaled(filled),
            layer=self.layer.scaled(filled),
            dense=self.dense and self.dense.scaled(filled),
            **{name: getattr(self, name) * filled for name in ("ends", "tp_time", "ep_time", "cp_time")},
        )


@dataclass(frozen=True)
class MicroBatch:
    """What one layer and the ends take in one micro-batch whatever the pipeline, seconds: arrays over layouts.

    Layers of two kinds that come in turns count as their mean. `embedding_sum` and `head_sum` are the ends' collectives
    over TP, `message` the bytes of the hidden state. Beside the head count what modules for further tokens have around
    their layers: embedding, joining and a head each.
    """

    layer: LayerWork
    dense: LayerWork | None
    embedding_forward: Floats
    embedding_backward: Floats
    head_forward: Floats
    head_backward: Floats
    embedding_sum: Floats
    head_sum: Floats
    message: Floats

    def take(self, rows: Ints) -> MicroBatch:
        """Those of the layouts at `rows`."""
        names = [field.name for field in fields(self)[2:]]
        layers = self.layer.take(rows), self.dense and self.dense.take(rows)
        return MicroBatch(*layers, **{name: getattr(self, name)[rows] for name in names})

    def paced(self, factor: Floats) -> MicroBatch:
        """The same where what ranks compute takes `factor` as long, shape (n,)."""
        computed = ("embedding_forward", "embedding_backward", "head_forward", "head_backward")
        return replace(
            self,
            layer=self.layer.paced(factor),
            dense=self.dense and self.dense.paced(factor),
            **{name: getattr(self, name) * factor for name in computed},
        )


# What a micro-batch takes depends on these as far as _layouts_alike says: pipelines, what ZeRO shards, and ranks other
# than those that a layer's collectives are among.
_ELSEWHERE = frozenset({
    "splits", "vpp", "schedule", "split", "split_row", "zero_stage", "dp_kind", "shard", "dp", "pp", "placement",
    "global_batch", "most_batches", "offload", "compression", "local_steps", "fragments", "outer_delay",
})  # fmt: skip


def micro_batch(case: Case, grid: LayoutGrid) -> MicroBatch:
    """What layers and ends take in one micro-batch, computed once for layouts that differ in nothing of it."""
    first, inverse = _layouts_alike(case, grid)
    return _micro_batch(case, grid) if len(first) == len(grid) else _micro_batch(case, grid.take(first)).take(inverse)


def _layouts_alike(case: Case, grid: LayoutGrid) -> tuple[Ints, Ints]:
    """Index of one layout of each kind whose layers take as long, and each layout's kind.

    Alike are those that share all choices but the ones made _ELSEWHERE, and of these where the ranks of a layer's
    collectives sit, how many work in a node, and what is kept of gradients from one micro-batch to the next.
    """
    cluster = case.cluster
    chosen = [getattr(grid, field.name) for field in fields(grid) if field.name not in _ELSEWHERE]
    sit = [np.where(grid.size(axis) > 1, grid.stride(axis), 0) for axis in ("tp", "cp")]
    sit += [grid.stage_places(np.minimum(grid.devices, cluster.devices_per_node))] if case.model.experts else []
    most = max(cluster.devices_per_node, cluster.devices_per_machine)
    # of more than two nodes, blocks that do not fill them evenly may lie across two borders
    working = (np.minimum(grid.devices, 2 * most + 1), _slots(case, grid).view(np.int64))
    gradients = [grid.micro_batches > 1, gradient_bytes(grid, case.stack), shards(grid, GRADIENTS)]
    gradients += [expert_shards(grid, GRADIENTS)] if case.model.experts else []
    if case.stack.recomputes_by_stage:
        gradients.append(np.where(grid.recompute_every > 1, grid.splits.fullest_stage[grid.split_row], 0))
    lone = (grid.lone,) if case.stack.gathers_beside_products else ()
    keys = (*chosen, *sit, *working, *gradients, *lone)
    return distinct([np.asarray(key).astype(np.int64, copy=False) for key in keys])


def _micro_batch(case: Case, grid: LayoutGrid) -> MicroBatch:
    rate = rates(case, grid.precision, _slots(case, grid), grid.lone)
    shapes = Shapes(case, grid, _slots)
    network = Network(case.cluster, case.calibration)
    sums = TensorSums(
        case.stack,
        grid,
        shapes.inverse,
        network,
        _tensor_group(case, grid),
        np.asarray(shapes.part.tp),
        shapes.product,
        rate.passed(2.0),
        shapes.part.casts.gathered_as_read,
    )
    head_forward, head_backward = shapes.head_time()
    embedding_forward, embedding_backward = shapes.time(shapes.embedding)
    of_embedding, of_head = _end_gradients(case, grid, shapes, rate)
    embedding_sum, head_sum = sums.seconds([shapes.embedding], "forward"), sums.seconds([shapes.head], "backward")
    if depth := case.model.mtp_depth:
        joining = [shapes.time(operator) for operator in shapes.joining]
        forward, backward = (reduce(np.add, phase) for phase in zip(*joining, strict=True))
        summed = sums.seconds(shapes.joining, "forward") + sums.seconds(shapes.joining, "backward")
        head_forward = head_forward + depth * (head_forward + forward + embedding_forward)
        head_backward = head_backward + depth * (head_backward + backward + embedding_backward)
        head_sum = head_sum + depth * (head_sum + summed + embedding_sum)
    layer = behind_shared(grid, shapes, layer_work(case, grid, shapes, sums, rate, case.model.main_kind))
    dense = layer_work(case, grid, shapes, sums, rate, "dense") if len(case.model.kinds) > 1 else None
    if dense is not None and case.model.experts_every > 1:
        layer, dense = layer.mixed(dense, 1.0 / case.model.experts_every), None
    return MicroBatch(
        layer=layer,
        dense=dense,
        embedding_forward=embedding_forward,
        embedding_backward=embedding_backward + of_embedding,
        head_forward=head_forward,
        head_backward=head_backward + of_head,
        embedding_sum=embedding_sum,
        head_sum=head_sum,
        message=np.asarray(shapes.part.message)[shapes.inverse],
    )


def _end_gradients(case: Case, grid: LayoutGrid, shapes: Shapes, rate: Rates) -> tuple[Floats, Floats]:
    """Seconds of a micro-batch in which the gradients of embedding and head are added to earlier ones.

    Autograd makes that of an embedding as large as the vocabulary, with zeros for words that no token has (PyTorch,
    aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda), unless the stack adds rows to the sum. A
    head that was measured has its sum with it.
    """
    model, stack = case.model, case.stack
    none: Floats = np.zeros(len(grid))
    matrix = padded_vocab_of(model, stack, grid.tp) * model.hidden / grid.tp
    added = matrix / shards(grid, GRADIENTS)
    embedding, head = none, none
    if not stack.adds_embedding_rows:
        made = rate.streamed(matrix * element_bytes(grid))
        embedding = made + accumulation_time(case, grid, added, rate, none)
    if model.head == "vocabulary" and not shapes.measured.has_head:
        head = accumulation_time(case, grid, added, rate, shapes.weight_gradient(shapes.head))
    return embedding, head


def _tensor_group(case: Case, grid: LayoutGrid) -> Group:
    return group(grid.tp, grid.stride("tp"), grid.devices, case.cluster)


def stage_work(case: Case, grid: LayoutGrid) -> StageWork:
    """What the stages do in one micro-batch."""
    rate, each = rates(case, grid.precision, _slots(case, grid)), micro_batch(case, grid)
    each = each.paced(waiting_factor(case, grid, each.layer) * slowest_factor(case, grid))
    layer, dense = behind_other_batch(case, grid, each.layer), each.dense
    held, arrives = _sends(case, grid, each.message)
    further = case.model.mtp_depth  # layers of the last stage beside those of the model
    times = StageTimes(
        forward=layer.busy_forward,
        backward=layer.busy_backward,
        weight=np.asarray(layer.weight),
        first_forward=each.embedding_forward + each.embedding_sum,
        first_backward=each.embedding_backward,
        last_forward=each.head_forward + further * layer.busy_forward,
        last_backward=each.head_backward + each.head_sum + further * layer.busy_backward,
        send_held=held,
        send_arrives=arrives,
        blocks=case.stack.blocking_schedules,
        eager=case.stack.stage_places >= 2,
        crowding=_crowding(case, grid, rate),
    )
    in_first: Floats = np.zeros(len(grid))
    if dense is not None:
        # A first stage of nothing but dense layers has the others' work, which paces the pipeline, behind it.
        in_first = np.minimum(grid.splits.first_stage[grid.split_row], case.model.dense_layers) * 1.0
        times = replace(
            times,
            first_forward=times.first_forward + in_first * (dense.busy_forward - layer.busy_forward),
            first_backward=times.first_backward + in_first * (dense.busy_backward - layer.busy_backward),
        )
    slowest, layers = slowest_rank(grid, times)
    # One stage is first and last at once.
    single = grid.pp == 1
    is_first = (slowest == 0) | single
    is_last = np.where(grid.folded, is_first, slowest == 2)
    layers = layers + is_last * further
    embedding, head = each.embedding_forward + each.embedding_backward, each.head_forward + each.head_backward
    ends = np.where(is_first, embedding, 0.0) + np.where(is_last, head, 0.0)
    dense_layers = is_first * in_first
    tp_time = layers * layer.tp + is_first * each.embedding_sum + is_last * each.head_sum
    if dense is not None:
        tp_time = tp_time + dense_layers * (dense.tp - layer.tp)
    ep_time, cp_time = (layers - dense_layers) * layer.ep, layers * layer.cp
    work = StageWork(times, rate, layers, layer, ends, tp_time, ep_time, cp_time, dense_layers, dense)
    filled = grid.filled
    return work if np.all(filled >= 1.0) else work.scaled(filled)


def _slots(case: Case, grid: LayoutGrid) -> Floats:
    """Ranks that work at once on a machine's cores, on average, or 1 where each has a device of its own.

    Stages that have less to do than the fullest wait for it, and leave their cores to others meanwhile.
    """
    cluster = case.cluster
    if not cluster.device.cores:
        return np.ones(len(grid))
    return np.maximum(1.0, np.minimum(grid.devices, cluster.devices_per_machine) * _evenness(case, grid))


def _evenness(case: Case, grid: LayoutGrid) -> Floats:
    """What the mean stage computes over what the fullest does, by layers and the head."""
    layers = grid.splits.layers(grid.split_row).sum(axis=1).astype(np.float64)
    layers[np.arange(len(grid)), np.where(grid.folded, 0, grid.pp - 1)] += head_in_layers(
        case.model, case.workload.seq_len
    )
    return np.asarray(layers.sum(axis=1) / (grid.pp * layers.max(axis=1)))


def _crowding(case: Case, grid: LayoutGrid, rate: Rates) -> Floats:
    """How many times slower products are when all stages work at once than when one stage has the cores."""
    if not case.cluster.device.cores:
        return np.ones(len(grid))
    one_stage = slowdowns(case.cluster, grid.devices // grid.pp).matmul
    return np.maximum(1.0, rate.matmul_slowdown / one_stage)


def _sends(case: Case, grid: LayoutGrid, message: Floats) -> tuple[Floats, Floats]:
    """Time a send between stages holds its link and takes to arrive, on nodes filled in rank order."""
    stride, per_node = grid.stride("pp"), case.cluster.devices_per_node
    # Pipelines that fill nodes exactly stay inside them; any other has a replica that spans two.
    crosses = (grid.pp > 1) & (grid.devices > per_node) & (per_node % np.maximum(stride * grid.pp, 1) != 0)
    # All ranks of a node that sit next to a boundary send at once: those of one stage in it.
    rivals = np.minimum(np.minimum(stride, per_node), grid.devices).astype(np.float64)
    return send_times(case, grid, message, crosses, rivals)


def send_times(
    case: Case, grid: LayoutGrid, message: Floats, crosses: Bools, rivals: Floats, link: Link | None = None
) -> tuple[Floats, Floats]:
    """Seconds in which a send of the hidden state's `message` bytes holds its link, and until it arrives.

    Between nodes where it `crosses`, over `link` where it is not the cluster's, beside `rivals` others. Sequence
    parallelism holds shards and sends them. Some stacks split what their tensor-parallel ranks all hold, send a part
    each and gather it on arrival: Megatron-LM under its interleaved schedule (Narayanan et al., arXiv 2104.04473,
    section 4.1), DeepSpeed's pipeline engine always.
    """
    splits = grid.chose("schedule", *case.stack.splits_sends) & ~grid.sequence_parallel
    size = message / np.where(splits | grid.sequence_parallel, grid.tp, 1)
    network = Network(case.cluster, case.calibration)
    held, arrives = network.send(size, crosses, rivals, link)
    if not splits.any():
        return held, arrives
    return held, arrives + np.where(splits, network.all_gather(message, _tensor_group(case, grid)), 0.0)
