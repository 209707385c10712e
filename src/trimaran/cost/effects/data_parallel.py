"""Time in which replicas agree on gradients, and what of it the backward pass does not hide."""

from __future__ import annotations

import numpy as np

from trimaran.cost.calibration import Calibration
from trimaran.cost.grid import DP_KINDS, Floats, LayoutGrid
from trimaran.cost.memory import element_bytes, gradient_bytes
from trimaran.cost.network import Network, group
from trimaran.nouns.stack import Stack


def exposed_time(
    grid: LayoutGrid,
    stack: Stack,
    network: Network,
    calibration: Calibration,
    parameters: Floats,
    tied_parameters: Floats,
    backward_s: Floats,
) -> Floats:
    """Seconds an iteration waits for data-parallel traffic.

    `parameters` on the rank; `tied_parameters` those of an embedding that first and last stage both hold;
    `backward_s` compute of one micro-batch's backward, behind which traffic can hide.

    All-reduce moves the gradients twice; ZeRO-1 reduce-scatters them and all-gathers the weights, the same
    volume; ZeRO-2 reduce-scatters every micro-batch; ZeRO-3 gathers the weights in forward and backward of
    every micro-batch too (Rajbhandari et al., arXiv 1910.02054, section 7). A parameter server takes in the sum
    of the gradients and sends out the weights.
    """
    where = group(grid.dp, grid.stride("dp"), grid.devices, network.cluster)
    gradient = gradient_bytes(grid, stack) * parameters
    weights = element_bytes(grid) * parameters
    m = grid.micro_batches.astype(np.float64)
    scatter = network.all_gather(gradient, where)
    gather = network.all_gather(weights, where)
    zero = grid.zero_stage
    traffic = np.where(zero == 0, network.all_reduce(gradient, where), scatter + gather)
    traffic = np.where(zero == 2, m * scatter + gather, traffic)
    sharded = (grid.dp_kind == DP_KINDS.index("fully_sharded")) | (zero == 3)
    traffic = np.where(sharded, m * (scatter + 2.0 * gather), traffic)
    served = grid.dp_kind == DP_KINDS.index("parameter_server")
    if served.any():
        traffic = np.where(served, network.serve(gradient, where), traffic)
    hidden = np.minimum(traffic * calibration.dp_overlap, np.where(sharded, m * 1.5, 1.0) * backward_s)
    return traffic - hidden + _tied_embedding(grid, stack, network, tied_parameters)


def _tied_embedding(grid: LayoutGrid, stack: Stack, network: Network, tied_parameters: Floats) -> Floats:
    """All-reduce of a tied embedding's gradient between the first and the last stage."""
    if not stack.tied_embedding_replicated:
        return np.zeros(len(grid))
    pair = np.where(grid.pp > 1, 2, 1)
    where = group(pair, grid.stride("pp") * (grid.pp - 1), grid.devices, network.cluster)
    reduced = network.all_reduce(tied_parameters * gradient_bytes(grid, stack), where)
    return np.where(tied_parameters > 0, reduced, 0.0)
