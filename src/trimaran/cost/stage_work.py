"""What a rank of each pipeline stage does in one micro-batch, seconds, vectorised over layouts."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from trimaran.cost.calibration import Calibration
from trimaran.cost.effects.optimizer import accumulation_time
from trimaran.cost.grid import RECOMPUTES, Floats, LayoutGrid, distinct, padded_vocab_of
from trimaran.cost.memory import element_bytes
from trimaran.cost.network import Group, Network, group
from trimaran.cost.operators.layer import LayerModel, LayerTime, Rates, rates, slowdowns
from trimaran.cost.pipeline.closed_form import StageTimes, slowest_rank
from trimaran.layout.layout import SCHEDULES
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload


@dataclass(frozen=True)
class StageWork:
    """What layers and ends cost (arrays over layouts, seconds per micro-batch), and their parts on the slowest rank.

    `layers` that rank holds; `ends` and `tp_time` are its head and embedding, and its TP collectives.
    """

    times: StageTimes
    rate: Rates
    layers: Floats
    layer_forward: Floats
    layer_backward: Floats
    layer_recompute: Floats
    ends: Floats
    tp_time: Floats


def stage_work(
    workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, calibration: Calibration
) -> StageWork:
    """What the stages do in one micro-batch."""
    model = workload.model
    rate = rates(cluster, calibration, grid.precision, grid.devices)
    layer, head_forward, head_backward, embedding = _per_shape(workload, cluster, stack, grid, calibration)
    forward, backward, attention = layer.forward, layer.backward, layer.attention_forward
    backward = backward + accumulation_time(grid, stack, model.layer_parameters / grid.tp, rate)
    recompute = np.where(grid.recompute == RECOMPUTES.index("full"), forward / grid.recompute_every, 0.0)
    recompute = np.where(grid.recompute == RECOMPUTES.index("selective"), attention, recompute)
    network = Network(cluster, calibration)
    message = grid.mbs * float(workload.seq_len) * model.hidden * element_bytes(grid)
    where = group(grid.tp, grid.stride("tp"), grid.devices, cluster)
    reduce = network.all_reduce(message, where)
    # A device that waits for its host does so while the collectives run, so only what is longer shows.
    again = np.where(grid.recompute == RECOMPUTES.index("full"), 1.0 / grid.recompute_every, 0.0)
    tp_forward = np.maximum(2.0 * reduce - layer.idle_forward, 0.0)
    tp_backward = np.maximum(2.0 * reduce - layer.idle_backward, 0.0) + again * tp_forward
    held, arrives = _sends(grid, stack, network, message, where)
    times = StageTimes(
        forward=forward + tp_forward,
        backward=backward + recompute + tp_backward,
        weight=0.5 * backward,
        # The embedding is reduced over TP forward, the head's input gradient backward.
        first_forward=embedding / 3.0 + reduce,
        first_backward=embedding * (2.0 / 3.0),
        last_forward=head_forward,
        last_backward=head_backward + reduce,
        send_held=held,
        send_arrives=arrives,
        blocks=not stack.overlap_pp,
        crowding=_crowding(cluster, grid, rate),
    )
    slowest, layers = slowest_rank(grid, times)
    # One stage is first and last at once.
    single = grid.pp == 1
    is_first, is_last = (slowest == 0) | single, slowest == 2
    ends = np.where(is_first, embedding, 0.0) + np.where(is_last, head_forward + head_backward, 0.0)
    tp_time = layers * (tp_forward + tp_backward) + (is_first.astype(np.float64) + is_last) * reduce
    return StageWork(times, rate, layers, forward, backward, recompute, ends, tp_time)


def _per_shape(
    workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, calibration: Calibration
) -> tuple[LayerTime, Floats, Floats, Floats]:
    """Layer and head times, computed once for each distinct shape that the grid holds."""
    slots = np.minimum(grid.devices, cluster.devices_per_machine) if cluster.device.cores else np.ones_like(grid.tp)
    first, inverse = distinct((grid.tp, grid.mbs, grid.precision, grid.sequence_parallel.astype(np.int64), slots))
    tp, mbs = grid.tp[first], grid.mbs[first]
    rate = rates(cluster, calibration, grid.precision[first], slots[first])
    kernels = LayerModel(workload.model, workload.seq_len, cluster, stack, calibration)
    layer = kernels.layer(tp, mbs, grid.sequence_parallel[first], rate)
    head_forward, head_backward = kernels.head(padded_vocab_of(workload.model, stack, tp), tp, mbs, rate)
    embedding = kernels.embedding(mbs, rate)
    whole = LayerTime(**{part.name: getattr(layer, part.name)[inverse] for part in fields(LayerTime)})
    return whole, head_forward[inverse], head_backward[inverse], embedding[inverse]


def _crowding(cluster: Cluster, grid: LayoutGrid, rate: Rates) -> Floats:
    """How many times slower products are when all stages work at once than when one stage has the cores."""
    if not cluster.device.cores:
        return np.ones(len(grid))
    one_stage, _, _ = slowdowns(cluster, grid.devices // grid.pp)
    return np.maximum(1.0, rate.matmul_slowdown / one_stage)


def _sends(
    grid: LayoutGrid, stack: Stack, network: Network, message: Floats, tensor_group: Group
) -> tuple[Floats, Floats]:
    """Time a send between stages holds its link and takes to arrive.

    Sequence parallelism holds shards and sends them. Some stacks split what their tensor-parallel ranks all hold,
    send a part each and gather it on arrival: Megatron-LM under its interleaved schedule (Narayanan et al.,
    arXiv 2104.04473, section 4.1), DeepSpeed's pipeline engine always.
    """
    splitting = [i for i, name in enumerate(SCHEDULES) if name in stack.splits_sends]
    splits = np.isin(grid.schedule, splitting) & ~grid.sequence_parallel
    size = message / np.where(splits | grid.sequence_parallel, grid.tp, 1)
    stride, per_node = grid.stride("pp"), network.cluster.devices_per_node
    # Pipelines that fill nodes exactly stay inside them; any other has a replica that spans two.
    crosses = (grid.pp > 1) & (grid.devices > per_node) & (per_node % np.maximum(stride * grid.pp, 1) != 0)
    # All ranks of a node that sit next to a boundary send at once: those of one stage in it.
    rivals = np.minimum(np.minimum(stride, per_node), grid.devices).astype(np.float64)
    held, arrives = network.send(size, crosses, rivals)
    return held, arrives + np.where(splits, network.all_gather(message, tensor_group), 0.0)
