"""Data parallelism: time in which replicas agree on gradients, and what of it the backward pass does not hide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.effects.copies import between_copies, coding_time, outer_time, sharded_copies
from trimaran.cost.effects.effect import Effect, IterationCost, TimePart
from trimaran.cost.grid import Bools, Floats, LayoutGrid, among, padded_vocab_of
from trimaran.cost.memory.stage import layer_parameters, rank_expert_parameters, rank_layer_parameters
from trimaran.cost.network import Group, crowded, expert_group
from trimaran.cost.states import (
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    element_bytes,
    expert_shards,
    gathered_bytes,
    gradient_bytes,
    keeps_whole,
    sent_gradient_bytes,
    shards,
)
from trimaran.layout.layout import Layout


def exposed_time(iteration: IterationCost) -> Floats:
    """Seconds an iteration waits for data-parallel traffic.

    All-reduce moves the gradients twice; ZeRO-1 reduce-scatters them, where the stack does not sum them whole, and
    all-gathers the weights, the same volume; ZeRO-2 reduce-scatters every micro-batch (Rajbhandari et al., arXiv
    1910.02054, section 7). Ranks that share a sequence take part as replicas do; where a part of the replicas shares
    out the states, the parts' copies are summed besides. A parameter server takes in the sum of the gradients and sends
    out the weights. Traffic can hide behind the last backwards, and weights that ZeRO-1 and 2 gather behind the first
    forwards where the stack does so. Where weights are sharded, traffic is layer by layer. What copies of weights send
    each other may be compressed, or wait for the end of a round of local steps.
    """
    case, grid, network, work = iteration.case, iteration.grid, iteration.network, iteration.work
    replicas = iteration.group_along("cp", "dp")
    sharers = iteration.group_along("cp", "shard")
    sent, gathered = sent_gradient_bytes(grid, case.stack), gathered_bytes(case, grid)
    m, zero = iteration.micro_batches, grid.zero_stage
    of_experts = iteration.expert_parameters
    shared = iteration.parameters if of_experts is None else iteration.parameters - of_experts
    gradient = sent * shared
    scatter = _scattered(iteration, gradient, sharers)
    gather = network.all_gather(gathered * shared, sharers)
    agreed = between_copies(case, grid, sent) * shared
    reduced = network.all_reduce(agreed, replicas)
    if of_experts is not None:
        own = _expert_sharers(iteration)
        scatter = scatter + _scattered(iteration, sent * of_experts, own)
        gather = gather + network.all_gather(gathered * of_experts, own)
        reduced = reduced + network.all_reduce(sent * of_experts, expert_group(grid, network.cluster, "edp"))
    copied = sharded_copies(iteration, agreed, None if of_experts is None else sent * of_experts)
    if grid.local_steps.any():
        each = grid.local_steps == 0
        reduced, copied = reduced * each, copied * each
    traffic = np.where(zero == 0, reduced, scatter + gather + copied)
    served = grid.chose("dp_kind", "parameter_server")
    if served.any():
        each = (sent + element_bytes(grid)) / 2.0  # weights go back, which are narrower than the gradients in 16 bit
        serving = network.serve(each * shared, replicas)
        if of_experts is not None:
            serving = serving + network.serve(each * of_experts, expert_group(grid, network.cluster, "edp"))
        traffic = np.where(served, serving, traffic)
    overlap = case.calibration.dp_overlap * among(zero, case.stack.overlapped_zero_stages)
    # ZeRO 2 scatters behind the backward of each micro-batch, the last one's with what follows
    earlier = np.where(zero == GRADIENTS, m - 1.0, 0.0)
    exposed = traffic + earlier * scatter
    if overlap.any():
        backward = work.of_layers("backward")
        # A later stage has one bucket, whose gather begins with its first forward and holds that up; virtual stages are
        # gathered ahead (Megatron-Core 0.15, core/distributed/distributed_data_parallel.py, lines 122 and 123;
        # training/arguments.py, lines 612 to 615; pipeline_parallel/schedules.py, lines 1034 and 1156).
        ahead = ((grid.pp == 1) | (grid.vpp > 1)) * float(case.stack.gathers_behind_forward)
        gathered_apart = np.where((zero == OPTIMIZER) | (zero == GRADIENTS), gather, 0.0)
        hidden = _hidden((traffic - gathered_apart) * overlap, backward, grid)
        hidden = hidden + _hidden(gathered_apart * overlap * ahead, work.of_layers("forward"), grid)
        hidden = hidden + earlier * np.minimum(scatter * overlap, backward)
        exposed = exposed - hidden * (1.0 - crowded(case.cluster))
    sharded = grid.chose("dp_kind", "fully_sharded") | (zero == WEIGHTS)
    if sharded.any():
        exposed = np.where(sharded, _by_layer(iteration), exposed)
    passed = m * _cleared_bytes(iteration)
    if case.stack.bucket_passes:
        in_buckets = (zero == OPTIMIZER) | (zero == GRADIENTS)
        passed = passed + in_buckets * (1.0 + earlier) * float(case.stack.bucket_passes) * sent * iteration.parameters
    passes = work.rate.streamed(passed)
    return np.asarray(exposed + passes + _shared_embedding(iteration) + coding_time(iteration) + outer_time(iteration))


def _cleared_bytes(iteration: IterationCost) -> Floats:
    """Bytes that pass through memory, a micro-batch, where a unit's gradients lie apart from their sum.

    They are set to zero before the backward; of what is scattered a rank's part and its sum are read, and one written.
    """
    grid, stack = iteration.grid, iteration.case.stack
    summed = iteration.parameters / shards(grid, GRADIENTS)
    if (experts := iteration.expert_parameters) is not None:
        summed = summed + experts * (1.0 / expert_shards(grid, GRADIENTS) - 1.0 / shards(grid, GRADIENTS))
    apart = (grid.zero_stage >= GRADIENTS) & stack.clears_unit_gradients
    return np.where(apart, gradient_bytes(grid, stack) * (iteration.parameters + 3.0 * summed), 0.0)


def _scattered(iteration: IterationCost, size: Floats, sharers: Group) -> Floats:
    """Seconds in which ranks that share gradients out sum them: each its part, or all of them where the stack does."""
    scattered, whole = iteration.network.all_gather(size, sharers), iteration.case.stack.all_reduced_zero_stages
    if not whole:
        return scattered
    return np.where(among(iteration.grid.zero_stage, whole), iteration.network.all_reduce(size, sharers), scattered)


def _expert_sharers(iteration: IterationCost) -> Group:
    """The ranks that share out the states of the same routed experts."""
    return expert_group(iteration.grid, iteration.network.cluster, "eshard")


@dataclass(frozen=True)
class LayersTraffic:
    """Seconds a micro-batch of what replicas send where each layer's weights are gathered by themselves: arrays.

    A layer's `gather` before its forward; before and after its backward what `travels`, of which `scatter` is the sum
    of its gradients and `copied` that between copies of shards; `behind_forward` and `behind_backward` are what its
    compute hides. `ends` are gathers and sums of what is no layer's.
    """

    gather: Floats
    scatter: Floats
    copied: Floats
    travels: Floats
    behind_forward: Floats
    behind_backward: Floats
    ends: Floats


def layers_traffic(iteration: IterationCost) -> LayersTraffic:
    """What layers gather and sum, and what of it hides.

    The next layer's gather, and in the backward the reduce-scatter of the layer before, run while a layer computes
    (PyTorch FSDP: Zhao et al., arXiv 2304.11277, section 3.3; fully_shard prefetches one unit likewise); what is
    longer than the layer with its collectives inside a node shows.
    """
    case, grid, network, work = iteration.case, iteration.grid, iteration.network, iteration.work
    sharers = iteration.group_along("cp", "shard")
    layer, every = layer_parameters(case.model, grid), case.model.experts_every
    experts: Floats | float = 0.0
    if case.model.experts:
        experts = rank_expert_parameters(case.model, grid) / every
    if every > 1:
        layer = layer / every + (1.0 - 1.0 / every) * rank_layer_parameters(case.model, grid, "dense")
    ends = np.maximum(iteration.parameters - work.layers * layer, 0.0)
    layer = layer - experts
    element, sent = gathered_bytes(case, grid), sent_gradient_bytes(grid, case.stack)
    gather, gather_ends = (network.all_gather(element * each, sharers) for each in (layer, ends))
    scatter, scatter_ends = (network.all_gather(sent * each, sharers) for each in (layer, ends))
    kept = keeps_whole(case.stack, grid)
    times = np.where(kept | (not case.stack.sums_copies_once), 1.0, 1.0 / iteration.micro_batches)
    times = np.where(grid.local_steps > 0, 0.0, times)
    agreed = between_copies(case, grid, sent)
    own_copies = sent * experts if case.model.experts else None
    copied = sharded_copies(iteration, agreed * layer, own_copies) * times
    copied_ends = sharded_copies(iteration, agreed * ends) * times
    if case.model.experts:
        own = _expert_sharers(iteration)
        gather = gather + network.all_gather(element * experts, own)
        scatter = scatter + network.all_gather(sent * experts, own)
    again = np.where(grid.zero_stage == 2, 0.0, gather)
    if case.stack.reuse_parameters:  # what the last layers' backward wants at once was not let go
        again = again * (1.0 - np.minimum(0.5 * case.stack.reuse_parameters / iteration.parameters, 1.0))
    forward, backward = work.layer.busy_forward, work.layer.busy_backward
    if case.model.experts:
        # tokens on their way between nodes take the same cards
        across = expert_group(grid, network.cluster, "ep").crosses
        forward = forward - np.where(across, work.layer.ep_forward, 0.0)
        backward = backward - np.where(across, work.layer.ep_backward, 0.0)
    overlap = case.calibration.dp_overlap
    # Copies' sums have a stream of their own, and links of their own where shards are gathered inside a node.
    travels = again + scatter
    travels = np.where(sharers.crosses, travels + copied, np.maximum(travels, copied))
    return LayersTraffic(
        gather,
        scatter,
        copied,
        travels,
        behind_forward=np.minimum(gather, forward) * overlap,
        behind_backward=np.minimum(travels, backward) * overlap,
        ends=gather_ends + scatter_ends + copied_ends,
    )


def _by_layer(iteration: IterationCost) -> Floats:
    """Seconds exposed where each layer's weights are gathered for its forward, and under ZeRO-3 for its backward.

    Nothing hides the first gathers of a micro-batch and its last reduce-scatters, the ends' among them. A pipeline's
    may be gathered once, with the first forward, and scattered after the last backward, which nothing hides.
    """
    case, grid, work, traffic = iteration.case, iteration.grid, iteration.work, layers_traffic(iteration)
    gather, behind_forward, behind_backward = traffic.gather, traffic.behind_forward, traffic.behind_backward
    element, sent = gathered_bytes(case, grid), sent_gradient_bytes(grid, case.stack)
    shown = (gather - behind_forward) + (traffic.travels - behind_backward)
    slowed = crowded(case.cluster) * (behind_forward + behind_backward)
    first_and_last = gather + traffic.scatter + traffic.copied + traffic.ends
    others = np.maximum(work.layers - 1.0, 0.0)
    laid = work.rate.streamed(laid_bytes(iteration, element, sent) * iteration.parameters)
    each = iteration.micro_batches * (others * (shown + slowed) + first_and_last + laid)
    kept = keeps_whole(case.stack, grid)
    if not kept.any():
        return np.asarray(each)
    # 16-bit gradients are added to the sum of those before, which is read and written
    summed = work.rate.streamed((element_bytes(grid) + 2.0 * sent) * iteration.parameters)
    gathered = gather - (1.0 - crowded(case.cluster)) * behind_forward
    once = first_and_last + others * (gathered + traffic.scatter + traffic.copied) + laid
    return np.asarray(np.where(kept, once + iteration.micro_batches * summed, each))


def laid_bytes(iteration: IterationCost, element: Floats, sent: Floats) -> Floats:
    """Bytes a parameter that pass through memory, a micro-batch, between what units compute with and what travels.

    FSDP2 gathers into a buffer and copies from there into the parameters, and lays a unit's gradients together in the
    precision in which it scatters them (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py, lines 485 to
    489 and 784). FSDP1 computes with views of what it gathered, whose gradients autograd joins before they are cast.
    """
    stack, grid = iteration.case.stack, iteration.grid
    gathers = np.where(grid.zero_stage == 2, 1.0, 2.0)
    passes = stack.gradient_passes
    joined = passes * element_bytes(grid) + sent if passes else 0.0
    return 2.0 * element * gathers * stack.copies_gathered + joined


def _hidden(traffic: Floats, one: Floats, grid: LayoutGrid) -> Floats:
    """Seconds of traffic that hide behind passes of which one, of one micro-batch through a rank, takes `one`.

    With virtual stages a chunk's gradients are all there once the last p micro-batches have come back through it, so
    that those of all chunks but the last travel while p micro-batches pass the chunks that remain, and weights alike
    (Megatron-Core 0.15, pipeline_parallel/schedules.py, lines 1156 to 1168 and 1237 to 1270).
    """
    last = 1.0 / grid.vpp
    passing = np.minimum(grid.pp, grid.micro_batches) * (1.0 - last)
    return np.asarray(np.minimum(traffic * last, one * last) + np.minimum(traffic * (1.0 - last), one * passing))


def _shared_embedding(iteration: IterationCost) -> Floats:
    """All-reduce of an embedding's gradient between the first and the last stage, where both hold it.

    Folded, both are on one rank, which holds it once.
    """
    case, grid = iteration.case, iteration.grid
    apart = ends_sum_embedding(case, grid)
    if not apart.any():
        return np.zeros(len(grid))
    reduced = iteration.network.all_reduce(tied_gradient_bytes(case, grid), iteration.end_stages)
    return np.where(apart, reduced, 0.0)


def ends_sum_embedding(case: Case, grid: LayoutGrid) -> Bools:
    """Whether the first and the last stage stand apart and sum the gradient of one embedding.

    Both have it where it is tied, and where further tokens are embedded with the last layers (Megatron-Core 0.16.1,
    core/distributed/finalize_model_grads.py, line 146).
    """
    model = case.model
    both_have = model.tied_embedding and model.head == "vocabulary"
    shared = case.stack.tied_embedding_replicated and (both_have or model.mtp_depth > 0)
    return np.asarray((grid.pp > 1) & ~grid.folded & shared)


def tied_gradient_bytes(case: Case, grid: LayoutGrid) -> Floats:
    """Bytes of a rank's part of that gradient."""
    parameters = padded_vocab_of(case.model, case.stack, grid.tp) * case.model.hidden / grid.tp
    return np.asarray(parameters * sent_gradient_bytes(grid, case.stack))


def _cause(layout: Layout, case: Case, micro_batches: int) -> str:
    ranks = f"{layout.dp} replicas" + (f" of {layout.cp} ranks each" if layout.cp > 1 else "")
    return f"{ranks} agree on gradients; a larger global batch, more overlap or a faster network"


DATA = Effect(
    (TimePart("dp", "replicas agree on gradients", _cause),), lambda iteration: {"dp": exposed_time(iteration)}
)
