"""Memory of one rank, in named parts (bytes): what is counted exactly, and what the allocator adds.

Activations follow Korthikanti et al., arXiv 2205.05198, eq. (1) and (2), written out by tensor so that
element sizes, TP, sequence parallelism, flash attention and unfused kernels each count.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import reduce

import numpy as np

from trimaran.cost.calibration import Calibration
from trimaran.cost.grid import DP_KINDS, RECOMPUTES, Bools, Floats, Ints, LayoutGrid, by_precision, padded_vocab_of
from trimaran.layout.layout import SCHEDULES
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.model import Model
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

GIB = 2.0**30
LOSS_CHUNK_TOKENS = {"cpu": 512, "gpu": 4096}  # trimaran.train.model.vocabulary.CHUNK_TOKENS and GPU_CHUNK_TOKENS


@dataclass(frozen=True)
class StageMemory:
    """Bytes on a rank of one stage, arrays over layouts (or over the stages of one layout)."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    logits: Floats
    buffers: Floats
    context: Floats

    @property
    def total(self) -> Floats:
        """All of it."""
        return reduce(np.add, (getattr(self, field.name) for field in fields(self)))

    @property
    def allocated(self) -> Floats:
        """What the framework's allocator hands out: all but context and buffers outside it."""
        return self.total - self.context - self.buffers


@dataclass(frozen=True)
class StageShape:
    """What a rank of one stage holds: layers, micro-batches in flight (in units of whole stages), ends."""

    layers: Floats
    in_flight: Floats
    embedding: Bools
    head: Bools


def in_flight(grid: LayoutGrid, stage: Floats) -> Floats:
    """Micro-batches whose activations a rank of `stage` (0 the first) keeps at the peak.

    1F1B and zero-bubble (ZB-H1): p - stage; GPipe: all; interleaved: 2 (p - stage - 1) + (v - 1) p + 1
    chunks of 1/v of its layers (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    m, p, v = grid.micro_batches.astype(np.float64), grid.pp, grid.vpp
    one_f_one_b = np.minimum(p - stage, m)
    chunks = np.minimum(2.0 * (p - stage - 1) + (v - 1.0) * p + 1.0, m * v) / v
    flying = np.where(grid.schedule == SCHEDULES.index("gpipe"), m, one_f_one_b)
    flying = np.where(grid.schedule == SCHEDULES.index("interleaved"), chunks, flying)
    return np.where(p > 1, flying, 1.0)


def parameters(model: Model, stack: Stack, grid: LayoutGrid, shape: StageShape) -> Floats:
    """Parameters on a rank of the stage, before ZeRO shards them."""
    t = grid.tp
    vocabulary = padded_vocab_of(model, stack, t) * model.hidden / t
    fixed = model.embedding_parameters() - (-(-model.vocab // 128) * 128) * model.hidden
    own_head = shape.head & (model.head == "vocabulary")
    if model.tied_embedding:
        # A tied head is the embedding itself where both sit on one stage, and a copy of it elsewhere.
        own_head = own_head & ~shape.embedding & stack.tied_embedding_replicated
    return (
        shape.layers * model.layer_parameters / t
        + np.where(shape.embedding, vocabulary + fixed, 0.0)
        + np.where(own_head, vocabulary, 0.0)
        + np.where(shape.head, float(model.norm_parameters), 0.0)
    )


def element_bytes(grid: LayoutGrid) -> Floats:
    """Bytes of an activation or of a working weight."""
    return by_precision(grid.precision, lambda p: p.activation_bytes)


def gradient_bytes(grid: LayoutGrid, stack: Stack) -> Floats:
    """Bytes a gradient is kept and travels in: its precision's, or those in which the stack accumulates it."""
    wide, wider = stack.wide_gradients, float(stack.grad_bytes_16bit)
    return by_precision(grid.precision, lambda p: wider if p.name in wide else p.gradient_bytes)


def layer_activations(
    model: Model, seq_len: int, stack: Stack, grid: LayoutGrid, *, cpu: bool
) -> tuple[Floats, Floats, Floats]:
    """Bytes that one layer keeps of one micro-batch: (everything, without the scores, its input alone)."""
    e = element_bytes(grid)
    t, b, s, h = grid.tp.astype(np.float64), grid.mbs.astype(np.float64), float(seq_len), float(model.hidden)
    whole = np.where(grid.sequence_parallel, t, 1.0)
    tokens = b * s
    # A dropout mask takes a byte an element on a GPU and a whole element on a CPU.
    masks = np.where(stack.dropout, e if cpu else 1.0, 0.0)
    attention = model.attention_hidden + 2.0 * model.kv_hidden + model.attention_hidden
    wide = model.ffn_hidden * (model.mlp_matrices if stack.fused_gelu else model.mlp_matrices + 1.0)
    if stack.framework == "trimaran":
        wide = model.ffn_hidden * float(model.mlp_matrices)
    rest = tokens * (h * (4.0 * e + 2.0 * masks) / whole + (attention + wide) * e / t)
    scores = np.zeros_like(rest)
    if not stack.flash_attention:
        copies = 2.0 if stack.fused_softmax else 3.0
        scores = b * (model.heads / t) * s * s * (copies * e + masks)
    else:
        rest = rest + tokens * (model.heads / t) * 4.0  # log-sum-exp of each row
    return rest + scores, rest, tokens * h * e / whole


def alibi_bytes(model: Model, seq_len: int, stack: Stack, grid: LayoutGrid) -> Floats:
    """Trimaran adds ALiBi to the scores as one (heads / TP, s, s) tensor that all layers of a rank share."""
    if stack.framework != "trimaran" or model.positions != "alibi":
        return np.zeros(len(grid))
    size: Floats = model.heads / grid.tp * float(seq_len) ** 2 * element_bytes(grid)
    return size


def stage_memory(
    workload: Workload, cluster: Cluster, stack: Stack, grid: LayoutGrid, calibration: Calibration, shape: StageShape
) -> StageMemory:
    """Memory of a rank of the stage described by `shape` under each layout of the grid."""
    model = workload.model
    count = parameters(model, stack, grid, shape)
    has_master = by_precision(grid.precision, lambda p: p.master) > 0
    zero = grid.zero_stage
    fully = grid.dp_kind == DP_KINDS.index("fully_sharded")
    dp = grid.dp.astype(np.float64)
    weight_share = np.where((zero >= 3) | fully, dp, 1.0)
    gradient_share = np.where((zero >= 2) | fully, dp, 1.0)
    optimizer_share = np.where((zero >= 1) | fully, dp, 1.0)
    gradient = gradient_bytes(grid, stack)
    moments = 2.0 if workload.optimizer == "adam" else 0.0
    states = by_precision(grid.precision, lambda p: moments * p.moment_bytes)
    master = np.where(has_master, float(stack.master_weight_bytes), 0.0)
    # Where gradients are kept in 16 bit, the step makes fp32 copies of those it updates by; activations are gone then.
    copied = count / optimizer_share * np.where(has_master & (gradient == 2.0), 4.0, 0.0)
    element = element_bytes(grid)
    # ZeRO-3 keeps two layers gathered: the one at work and the next.
    gathered = np.where(weight_share > 1, 2.0 * model.layer_parameters / grid.tp * element, 0.0)
    full, selective, kept = layer_activations(model, workload.seq_len, stack, grid, cpu=cluster.device.kind == "cpu")
    every = grid.recompute_every.astype(np.float64)
    recompute = grid.recompute
    is_full = recompute == RECOMPUTES.index("full")
    stored = np.where(recompute == RECOMPUTES.index("selective"), selective, full)
    stored = np.where(is_full, kept / every + full * (1.0 - 1.0 / every), stored)
    at_work = np.where(is_full, full, np.where(recompute == RECOMPUTES.index("selective"), full - selective, 0.0))
    if stack.recomputes_stage:
        stored = np.where(is_full, kept / np.maximum(shape.layers, 1.0), stored)
        at_work = np.where(is_full, full * shape.layers, at_work)
    v = padded_vocab_of(model, stack, grid.tp)
    tokens = grid.mbs * float(workload.seq_len)
    if stack.framework == "trimaran":
        # the MLP's backward holds the gradients of its inner activations and of its output beside them
        at_work = at_work + tokens * (model.mlp_matrices * model.ffn_hidden / grid.tp + model.hidden) * element
        tokens = np.minimum(tokens, LOSS_CHUNK_TOKENS[cluster.device.kind])
    # Three fp32 copies for the loss, and the logits in 16 bit that they are made from; or the logits and their
    # gradient alone, where the loss is fused and takes them as they are. They are gone before the backward pass
    # makes the first layer's activations again, so the larger of the two counts; but a heap in which other buffers
    # lie between has no room for large ones where logits were.
    copies = 12.0 + np.where(element == 2.0, element, 0.0) if stack.fp32_loss else 2.0 * element
    logits = tokens * v / grid.tp * copies if model.head == "vocabulary" else np.zeros(len(grid))
    logits = np.where(shape.head, logits, 0.0)
    reused = 0.0 if stack.framework == "trimaran" and cluster.device.kind == "cpu" else logits
    activations = shape.in_flight * shape.layers * stored + np.maximum(at_work - reused, 0.0)
    buckets = np.minimum(count, float(stack.bucket_elements)) * 2.0 * gradient
    ones = np.ones(np.broadcast_shapes(count.shape, activations.shape))
    alibi = alibi_bytes(model, workload.seq_len, stack, grid)
    return StageMemory(
        weights=(count / weight_share * element + gathered) * ones,
        gradients=count / gradient_share * gradient * ones,
        optimizer=(count / optimizer_share * (states + master) + np.maximum(copied - activations - logits, 0.0)) * ones,
        activations=(activations * calibration.activation_scale + alibi) * ones,
        logits=logits * ones,
        buffers=(calibration.buffer_gib * GIB + buckets) * ones,
        context=cluster.device.context_gib * GIB * ones,
    )


def memory_limit_gib(cluster: Cluster, devices: Ints, margin: float = 0.0) -> Floats:
    """GiB that a rank may use, `margin` left free: its device's, or its share of a node's memory where slots share it.

    By how many devices are used; shape of `devices`.
    """
    limit = np.full(np.shape(devices), cluster.device.mem_gib)
    if cluster.host_mem_gib:
        limit = np.minimum(limit, cluster.host_mem_gib / np.minimum(devices, cluster.devices_per_machine))
    return np.asarray(limit * (1.0 - margin))
