"""Data parallelism: time in which replicas agree on gradients, and what of it the backward pass does not hide."""

from __future__ import annotations

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import Effect, IterationCost, TimePart
from trimaran.cost.grid import Floats, LayoutGrid, padded_vocab_of
from trimaran.cost.network import Group, group
from trimaran.cost.states import GRADIENTS, OPTIMIZER, WEIGHTS, gathered_bytes, sent_gradient_bytes
from trimaran.layout.layout import Layout

# Channels of a ring over NVLink or several network cards, each a block of threads (NVIDIA/nccl 2.23, graph/connect.cc).
COLLECTIVE_MULTIPROCESSORS = 16.0


def exposed_time(iteration: IterationCost) -> Floats:
    """Seconds an iteration waits for data-parallel traffic.

    All-reduce moves the gradients twice; ZeRO-1 reduce-scatters them and all-gathers the weights, the same
    volume; ZeRO-2 reduce-scatters every micro-batch (Rajbhandari et al., arXiv 1910.02054, section 7). A parameter
    server takes in the sum of the gradients and sends out the weights. Traffic can hide behind the last backwards, and
    weights that ZeRO-1 and 2 gather behind the first forwards where the stack does so. Where weights are sharded,
    traffic is layer by layer.
    """
    case, grid, network, work = iteration.case, iteration.grid, iteration.network, iteration.work
    replicas = group(grid.dp, grid.stride("dp"), grid.devices, network.cluster)
    gradient = sent_gradient_bytes(grid, case.stack) * iteration.parameters
    m, zero = iteration.micro_batches, grid.zero_stage
    scatter = network.all_gather(gradient, replicas)
    gather = network.all_gather(gathered_bytes(case, grid) * iteration.parameters, replicas)
    traffic = np.where(zero == 0, network.all_reduce(gradient, replicas), scatter + gather)
    traffic = np.where(zero == 2, m * scatter + gather, traffic)
    served = grid.chose("dp_kind", "parameter_server")
    if served.any():
        traffic = np.where(served, network.serve(gradient, replicas), traffic)
    overlap = case.calibration.dp_overlap * np.isin(zero, case.stack.overlapped_zero_stages)
    backward = work.layer_backward * work.layers
    hidden = _hidden(traffic * overlap, backward, grid)
    if case.stack.gathers_behind_forward:
        apart = _hidden((traffic - gather) * overlap, backward, grid)
        apart = apart + _hidden(gather * overlap, work.layer_forward * work.layers, grid)
        hidden = np.where((zero == OPTIMIZER) | (zero == GRADIENTS), apart, hidden)
    exposed = traffic - hidden * (1.0 - _crowded(case))
    sharded = grid.chose("dp_kind", "fully_sharded") | (zero == WEIGHTS)
    if sharded.any():
        exposed = np.where(sharded, _by_layer(iteration, replicas), exposed)
    return np.asarray(exposed + _tied_embedding(iteration))


def _by_layer(iteration: IterationCost, replicas: Group) -> Floats:
    """Seconds exposed where each layer's weights are gathered for its forward, and under ZeRO-3 for its backward.

    The next layer's gather, and in the backward the reduce-scatter of the layer before, run while a layer computes
    (PyTorch FSDP: Zhao et al., arXiv 2304.11277, section 3.3; fully_shard prefetches one unit likewise); what is
    longer than the layer shows. Nothing hides the first gathers of a micro-batch and its last reduce-scatters, the
    ends' among them.
    """
    case, grid, network, work = iteration.case, iteration.grid, iteration.network, iteration.work
    layer = case.model.layer_parameters / grid.tp
    ends = np.maximum(iteration.parameters - work.layers * layer, 0.0)
    element, sent = gathered_bytes(case, grid), sent_gradient_bytes(grid, case.stack)
    gather, gather_ends = (network.all_gather(element * each, replicas) for each in (layer, ends))
    scatter, scatter_ends = (network.all_gather(sent * each, replicas) for each in (layer, ends))
    again = np.where(grid.zero_stage == 2, 0.0, gather)
    forward = work.layer_forward
    backward = work.layer_backward + work.layer_recompute
    overlap = case.calibration.dp_overlap
    behind_forward = np.minimum(gather, forward) * overlap
    behind_backward = np.minimum(again + scatter, backward) * overlap
    shown = (gather - behind_forward) + (again + scatter - behind_backward)
    crowded = _crowded(case) * (behind_forward + behind_backward)
    first_and_last = gather_ends + gather + scatter + scatter_ends
    of_layers = np.maximum(work.layers - 1.0, 0.0) * (shown + crowded)
    return np.asarray(iteration.micro_batches * (of_layers + first_and_last))


def _crowded(case: Case) -> float:
    """Share of a GPU's multiprocessors that a collective takes from the products beside it."""
    multiprocessors = case.cluster.device.multiprocessors
    return min(1.0, COLLECTIVE_MULTIPROCESSORS / multiprocessors) if multiprocessors else 0.0


def _hidden(traffic: Floats, one: Floats, grid: LayoutGrid) -> Floats:
    """Seconds of traffic that hide behind passes of which one, of one micro-batch through a rank, takes `one`.

    With virtual stages a chunk's gradients are all there once the last p micro-batches have come back through it, so
    that those of all chunks but the last travel while p micro-batches pass the chunks that remain, and weights alike
    (Megatron-Core 0.15, pipeline_parallel/schedules.py, lines 1156 to 1168 and 1237 to 1270).
    """
    last = 1.0 / grid.vpp
    passing = np.minimum(grid.pp, grid.micro_batches) * (1.0 - last)
    return np.asarray(np.minimum(traffic * last, one * last) + np.minimum(traffic * (1.0 - last), one * passing))


def _tied_embedding(iteration: IterationCost) -> Floats:
    """All-reduce of a tied embedding's gradient between the first and the last stage, which both hold it."""
    case, grid, model = iteration.case, iteration.grid, iteration.case.model
    if not (case.stack.tied_embedding_replicated and model.tied_embedding and model.head == "vocabulary"):
        return np.zeros(len(grid))
    ends = group(np.where(grid.pp > 1, 2, 1), grid.stride("pp") * (grid.pp - 1), grid.devices, case.cluster)
    parameters = padded_vocab_of(model, case.stack, grid.tp) * model.hidden / grid.tp
    reduced = iteration.network.all_reduce(parameters * sent_gradient_bytes(grid, case.stack), ends)
    return np.where(grid.pp > 1, reduced, 0.0)


def _cause(layout: Layout, case: Case, micro_batches: int) -> str:
    return f"{layout.dp} replicas agree on gradients; a larger global batch, more overlap or a faster network"


DATA = Effect(
    (TimePart("dp", "replicas agree on gradients", _cause),), lambda iteration: {"dp": exposed_time(iteration)}
)
