"""Data parallelism: time in which replicas agree on gradients, and what of it the backward pass does not hide."""

from __future__ import annotations

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import Effect, IterationCost, TimePart
from trimaran.cost.grid import Floats, padded_vocab_of
from trimaran.cost.network import group
from trimaran.cost.states import WEIGHTS, element_bytes, sent_gradient_bytes
from trimaran.layout.layout import Layout


def exposed_time(iteration: IterationCost) -> Floats:
    """Seconds an iteration waits for data-parallel traffic.

    All-reduce moves the gradients twice; ZeRO-1 reduce-scatters them and all-gathers the weights, the same
    volume; ZeRO-2 reduce-scatters every micro-batch; ZeRO-3 gathers the weights in forward and backward of
    every micro-batch too (Rajbhandari et al., arXiv 1910.02054, section 7). A parameter server takes in the sum
    of the gradients and sends out the weights. Traffic can hide behind the backward of one micro-batch, under ZeRO-3
    behind all compute.
    """
    case, grid, network, work = iteration.case, iteration.grid, iteration.network, iteration.work
    replicas = group(grid.dp, grid.stride("dp"), grid.devices, network.cluster)
    gradient = sent_gradient_bytes(grid, case.stack) * iteration.parameters
    m, zero = iteration.micro_batches, grid.zero_stage
    scatter = network.all_gather(gradient, replicas)
    gather = network.all_gather(element_bytes(grid) * iteration.parameters, replicas)
    traffic = np.where(zero == 0, network.all_reduce(gradient, replicas), scatter + gather)
    traffic = np.where(zero == 2, m * scatter + gather, traffic)
    gathers_weights = grid.chose("dp_kind", "fully_sharded") | (zero == WEIGHTS)
    traffic = np.where(gathers_weights, m * (scatter + 2.0 * gather), traffic)
    served = grid.chose("dp_kind", "parameter_server")
    if served.any():
        traffic = np.where(served, network.serve(gradient, replicas), traffic)
    behind = np.where(gathers_weights, m * 1.5, 1.0) * work.layer_backward * work.layers
    hidden = np.minimum(traffic * case.calibration.dp_overlap, behind)
    return traffic - hidden + _tied_embedding(iteration)


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
