"""Offload: what passes the host's link and what the host steps, as far as nothing hides it."""

from __future__ import annotations

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import Effect, IterationCost, TimePart
from trimaran.cost.effects.gradient_traffic import layers_traffic
from trimaran.cost.effects.optimizer import UNFUSED
from trimaran.cost.grid import Floats, by_precision
from trimaran.cost.layers.layer_work import LayerWork
from trimaran.cost.shapes import KeptBytes, kept_bytes, stored_bytes
from trimaran.cost.states import OPTIMIZER, expert_shards, gradient_bytes, shards, stepped_bytes
from trimaran.layout.layout import Layout

# Of a link's bandwidth what packets of 256 bytes leave beside 26 of headers (PCI Express Base Specification 5.0, 2.2).
LINK_SHARE = 256.0 / 282.0


def offload_time(iteration: IterationCost) -> Floats:
    """Seconds an iteration takes longer because something lies in the host's memory; 0 where nothing does."""
    case, grid = iteration.case, iteration.grid
    shown = np.zeros(len(grid))
    if not grid.offload.any() or not case.cluster.device.host_link_gb_s:
        return shown
    shown = np.where(grid.chose("offload", "optimizer", "weights"), _host_step(iteration), shown)
    shown = np.where(grid.chose("offload", "weights"), shown + _weights(iteration), shown)
    return np.where(grid.chose("offload", "activations"), _activations(iteration), shown)


def host_stepped(iteration: IterationCost) -> Floats:
    """Parameters that a rank's host steps."""
    grid, of_experts = iteration.grid, iteration.expert_parameters
    cut = shards(grid, OPTIMIZER)
    if of_experts is None:
        return iteration.parameters / cut
    return (iteration.parameters - of_experts) / cut + of_experts / expert_shards(grid, OPTIMIZER)


def _host_step(iteration: IterationCost) -> Floats:
    """Gradients go to the host, which steps them at its memory's bandwidth, and weights come back (arXiv 2101.06840).

    One after the other, or by parts beside each other where the stack does so. An optimizer that is not one kernel
    passes over all states several times. Weights that stay on the host come back layer by layer instead.
    """
    case, grid = iteration.case, iteration.grid
    device, stack, stepped = case.cluster.device, case.stack, host_stepped(iteration)
    gradient = gradient_bytes(grid, stack)
    moved = gradient + stepped_bytes(grid, case)
    passes = 1.0 if stack.fused_host_step else UNFUSED
    host = stepped * moved * passes / (device.host_mem_gb_s * 1e9 * case.calibration.memory)
    on_host = grid.chose("offload", "weights")
    down = np.where(on_host, 0.0, stepped * gradient / _link(case))
    up = np.where(on_host, 0.0, stepped * by_precision(grid.precision, lambda p: p.weight_bytes) / _link(case))
    if stack.offload_overlaps:
        return np.asarray(np.maximum(host, np.maximum(down, up)))
    return np.asarray(host + down + up)


def _weights(iteration: IterationCost) -> Floats:
    """Each micro-batch every layer's shard comes up twice and its gradients go down, behind the layer before it.

    In the forward a shard may come up while the one before it is gathered; in the backward it does so when that has
    been, and a layer hides one after the other (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py,
    wait_for_unshard: what streams wait for is the copy of the unit before, or of the unit itself).
    """
    case, grid, work = iteration.case, iteration.grid, iteration.work
    shard = host_stepped(iteration) / np.maximum(work.layers, 1.0)
    kept = by_precision(grid.precision, lambda p: 4.0 if case.stack.shards_master and p.master else p.weight_bytes)
    up, down = shard * kept / _link(case), shard * gradient_bytes(grid, case.stack) / _link(case)
    traffic = layers_traffic(iteration)
    forward = work.layer.busy_forward + traffic.gather - traffic.behind_forward
    backward = work.layer.busy_backward - traffic.behind_backward
    shown = _beyond(up, forward) + _beyond(np.maximum(up, down), backward)
    return np.asarray(iteration.micro_batches * work.layers * shown)


def _activations(iteration: IterationCost) -> Floats:
    """What a layer keeps goes down behind the next layer's forward and comes up behind the next one's backward.

    Nothing hides it where the layer waits for it.
    """
    work = iteration.work
    shown = work.layers * _of_layer(iteration, work.layer, kept_bytes(iteration.case, iteration.grid))
    if work.dense is not None:
        of_dense = _of_layer(iteration, work.dense, kept_bytes(iteration.case, iteration.grid, "dense"))
        shown = shown * (1.0 - work.dense_layers / work.layers) + work.dense_layers * of_dense
    elif (every := iteration.case.model.experts_every) > 1:
        of_dense = _of_layer(iteration, work.layer, kept_bytes(iteration.case, iteration.grid, "dense"))
        shown = shown / every + work.layers * (1.0 - 1.0 / every) * of_dense
    return np.asarray(iteration.micro_batches * shown)


def _of_layer(iteration: IterationCost, layer: LayerWork, kept: KeptBytes) -> Floats:
    """Seconds that a layer's activations of one micro-batch show, down and up."""
    case = iteration.case
    passing = stored_bytes(case.stack, iteration.grid, kept, iteration.work.layers) / _link(case)
    if case.stack.offload_waits:
        return 2.0 * passing
    return _beyond(passing, layer.busy_forward) + _beyond(passing, layer.busy_backward)


def _link(case: Case) -> float:
    """Bytes/s of one direction of the host's link."""
    return case.cluster.device.host_link_gb_s * 1e9 * LINK_SHARE


def _beyond(passing: Floats, computed: Floats) -> Floats:
    return np.asarray(np.maximum(passing - computed, 0.0))


def _cause(layout: Layout, case: Case, micro_batches: int) -> str:
    device = case.cluster.device
    return (
        f"{layout.offload} in the host's memory pass a link of {device.host_link_gb_s:g} GB/s and are stepped at "
        f"{device.host_mem_gb_s:g} GB/s; a larger global batch, more shards, or no offload"
    )


OFFLOAD = Effect(
    (TimePart("offload", "the host's link, and its steps", _cause),),
    lambda iteration: {"offload": offload_time(iteration)},
)
