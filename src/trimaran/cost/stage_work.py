"""What a rank of each pipeline stage does in one micro-batch, seconds, vectorised over layouts."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from trimaran.cluster import Cluster
from trimaran.cost.calibration import Calibration
from trimaran.cost.compute import LayerModel, LayerTime, Rates, rates, slowdowns
from trimaran.cost.grid import RECOMPUTES, Floats, Ints, LayoutGrid, padded_vocab_of
from trimaran.cost.memory import ELEMENT_BYTES
from trimaran.cost.network import Network, group
from trimaran.cost.pipeline import StageTimes
from trimaran.stack import Stack
from trimaran.workload import Workload


@dataclass(frozen=True)
class StageWork:
    """Times of the stages, and their parts on the slowest one (arrays over layouts, seconds per micro-batch).

    `per_layer` is what one layer adds to any stage's forward, backward and weight gradients.
    """

    times: StageTimes
    rate: Rates
    layers: Floats
    layer_forward: Floats
    layer_backward: Floats
    layer_recompute: Floats
    ends: Floats
    tp_time: Floats
    per_layer: tuple[Floats, Floats, Floats]


def stage_work(
    workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, calibration: Calibration
) -> StageWork:
    """What the first, the middle and the last stage do in one micro-batch."""
    model = workload.model
    rate = rates(cluster, calibration, grid.precision, grid.devices)
    layer, head_forward, head_backward, embedding = _per_shape(workload, cluster, stack, grid, calibration)
    forward, backward, attention = layer.forward, layer.backward, layer.attention_forward
    recompute = np.where(grid.recompute == RECOMPUTES.index("full"), forward / grid.recompute_every, 0.0)
    recompute = np.where(grid.recompute == RECOMPUTES.index("selective"), attention, recompute)
    network = Network(cluster, calibration)
    message = grid.mbs * float(workload.seq_len) * model.hidden * ELEMENT_BYTES[grid.precision]
    where = group(grid.tp, grid.stride("tp"), grid.devices, cluster)
    reduce = network.all_reduce(message, where)
    # A device that waits for its host does so while the collectives run, so only what is longer shows.
    again = np.where(grid.recompute == RECOMPUTES.index("full"), 1.0 / grid.recompute_every, 0.0)
    tp_forward = np.maximum(2.0 * reduce - layer.idle_forward, 0.0)
    tp_backward = np.maximum(2.0 * reduce - layer.idle_backward, 0.0) + again * tp_forward
    embedding_share = 1.0 / 3.0
    ends_forward = (embedding * embedding_share, np.zeros(len(grid)), head_forward)
    ends_backward = (embedding * (1 - embedding_share), np.zeros(len(grid)), head_backward)
    # The embedding is reduced over TP forward, the head's input gradient backward.
    ends_tp = (reduce, np.zeros(len(grid)), reduce)
    single = grid.pp == 1
    layers = tuple(n.astype(np.float64) for n in (grid.layers_first, grid.layers_middle, grid.layers_last))
    stage_forward = [n * (forward + tp_forward) + e for n, e in zip(layers, ends_forward, strict=True)]
    stage_backward = [n * (backward + recompute + tp_backward) + e for n, e in zip(layers, ends_backward, strict=True)]
    stage_forward[0] = stage_forward[0] + ends_tp[0]
    stage_backward[2] = stage_backward[2] + ends_tp[2]
    # One stage is first and last at once.
    stage_forward[2] = stage_forward[2] + np.where(single, ends_forward[0] + ends_tp[0], 0.0)
    stage_backward[2] = stage_backward[2] + np.where(single, ends_backward[0], 0.0)
    weight = tuple(n * 0.5 * backward for n in layers)
    held, arrives = _sends(grid, network, message)
    times = StageTimes(
        (stage_forward[0], stage_forward[1], stage_forward[2]),
        (stage_backward[0], stage_backward[1], stage_backward[2]),
        (weight[0], weight[1], weight[2]),
        _middle_share(grid, model.layers),
        held,
        arrives,
        blocks=not stack.overlap_pp,
        crowding=_crowding(cluster, grid, rate),
    )
    totals = np.stack([f + b for f, b in zip(stage_forward, stage_backward, strict=True)])
    totals[0] = np.where(single, -1.0, totals[0])
    totals[1] = np.where(grid.pp > 2, totals[1], -1.0)
    slowest = np.argmax(totals, axis=0)
    own_layers = np.choose(slowest, layers)
    ends = np.choose(slowest, [f + b for f, b in zip(ends_forward, ends_backward, strict=True)])
    ends = ends + np.where(single, embedding, 0.0)
    tp_time = own_layers * (tp_forward + tp_backward) + np.choose(slowest, ends_tp) + np.where(single, ends_tp[0], 0.0)
    per_layer = (forward + tp_forward, backward + recompute + tp_backward, 0.5 * backward)
    return StageWork(times, rate, own_layers, forward, backward, recompute, ends, tp_time, per_layer)


def _per_shape(
    workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, calibration: Calibration
) -> tuple[LayerTime, Floats, Floats, Floats]:
    """Layer and head times, computed once for each distinct shape that the grid holds."""
    slots = np.minimum(grid.devices, cluster.devices_per_machine) if cluster.device.cores else np.ones_like(grid.tp)
    first, inverse = _distinct(grid.tp, grid.mbs, grid.precision, grid.sequence_parallel.astype(np.int64), slots)
    tp, mbs = grid.tp[first], grid.mbs[first]
    rate = rates(cluster, calibration, grid.precision[first], slots[first])
    kernels = LayerModel(workload.model, workload.seq_len, cluster, stack, calibration)
    layer = kernels.layer(tp, mbs, grid.sequence_parallel[first], rate)
    head_forward, head_backward = kernels.head(padded_vocab_of(workload.model, stack, tp), tp, mbs, rate)
    embedding = kernels.embedding(mbs, rate)
    whole = LayerTime(**{part.name: getattr(layer, part.name)[inverse] for part in fields(LayerTime)})
    return whole, head_forward[inverse], head_backward[inverse], embedding[inverse]


def _distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """Index of one member of each distinct combination, and each row's combination."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, index = np.unique(column, return_inverse=True)
        key = key * len(values) + index
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def _crowding(cluster: Cluster, grid: LayoutGrid, rate: Rates) -> Floats:
    """How many times slower products are when all stages work at once than when one stage has the cores."""
    if not cluster.device.cores:
        return np.ones(len(grid))
    one_stage, _, _ = slowdowns(cluster, grid.devices // grid.pp)
    return np.maximum(1.0, rate.matmul_slowdown / one_stage)


def _middle_share(grid: LayoutGrid, layers: int) -> Floats:
    """Mean layers of the middle stages over the largest one's."""
    between = layers - grid.layers_first - grid.layers_last
    return np.where(grid.pp > 2, between / np.maximum((grid.pp - 2) * grid.layers_middle, 1), 0.0)


def _sends(grid: LayoutGrid, network: Network, message: Floats) -> tuple[Floats, Floats]:
    """Time a send between stages holds its link and takes to arrive; sequence parallelism sends shards."""
    size = message / np.where(grid.sequence_parallel, grid.tp, 1)
    stride, per_node = grid.stride("pp"), network.cluster.devices_per_node
    crosses = (grid.pp > 1) & (grid.devices > per_node)
    # All ranks of a node that sit next to a boundary send at once: those of one stage in it.
    rivals = np.minimum(np.minimum(stride, per_node), grid.devices).astype(np.float64)
    return network.send(size, crosses, rivals)
