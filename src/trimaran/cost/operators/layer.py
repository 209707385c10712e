"""Compute time of one transformer layer and of the head, per rank and micro-batch, by the shape of every product.

Symbols: b micro-batch, s sequence, h hidden, f ffn, a heads, d head size, V vocabulary, t = TP.
All functions take arrays over layouts and return seconds of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimaran.cost.calibration import Calibration
from trimaran.cost.grid import Bools, Floats, Ints, by_precision
from trimaran.cost.measured import AttentionTable, MatmulTable
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.model import Model
from trimaran.nouns.precision import PRECISIONS
from trimaran.nouns.stack import Stack

# Output tiles of the GEMM libraries and their rate relative to the best one; a small tile reloads
# its operands more often. NVIDIA, Deep Learning Performance Guide, matrix multiplication.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.80), (64, 64, 0.62))
# Elements of K that the prologue and the epilogue of a tile cost: on tensor cores, and without.
TENSOR_FILL_K, PLAIN_FILL_K = 96.0, 24.0
# Operators that one layer runs forward, and what its scores add where Megatron's fused softmax does not take them.
LAYER_OPERATORS, UNFUSED_SOFTMAX_OPERATORS = 20.0, 5.0
# Operators that autograd runs for one of the forward pass.
BACKWARD_OPERATORS = 1.4
# Bytes an element beyond a fused kernel's of a layer's two RMS norms, forward and backward, and of rotary angles, in
# PyTorch's eager operators: casts to fp32 and back, square, mean, scale; complex products.
EAGER_RMS_NORM_BYTES, EAGER_ROTARY_BYTES = (64.0, 100.0), 20.0
# Clock of a CPU whose cluster file states none.
USUAL_CLOCK_GHZ = 2.5
# Tensor cores want sizes in multiples of 16 bytes.
ALIGNMENT = 8


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer on one rank for one micro-batch, without communication; arrays.

    `idle_forward` and `idle_backward` are the parts in which a GPU waits for its host to launch more.
    """

    forward: Floats
    backward: Floats
    attention_forward: Floats
    idle_forward: Floats
    idle_backward: Floats


@dataclass(frozen=True)
class Rates:
    """What one rank computes and moves: arrays over layouts.

    `peak` operations/s, `bandwidth` bytes/s, `element` bytes of an activation. The slowdowns are how much
    longer a rank takes because of the others of its node: 1 on a GPU, more where slots share cores.
    """

    peak: Floats
    bandwidth: float
    element: Floats
    tensor_cores: Bools
    half: Bools
    matmul_slowdown: Floats
    memory_slowdown: Floats
    overhead_slowdown: Floats


def rates(cluster: Cluster, calibration: Calibration, precision: Ints, devices: Ints) -> Rates:
    """Ceilings of a rank under each layout's precision (index into PRECISIONS) and device count."""
    device = cluster.device
    peaks = [(device.peak(word) or 0.0) * 1e12 for word in PRECISIONS]
    peak = np.array([p or min(filter(None, peaks)) for p in peaks])[precision]
    on_cpu = device.kind == "cpu"
    element = by_precision(precision, lambda p: p.cpu_product_bytes if on_cpu else p.activation_bytes)
    matmul, memory, overhead = slowdowns(cluster, devices)
    tensor_cores = (element < 4) & (device.kind == "gpu")
    plain = (element == 4) & (device.kind == "gpu")
    return Rates(
        peak=peak * np.where(plain, calibration.gemm_plain, calibration.gemm),
        bandwidth=device.mem_bandwidth_gb_s * 1e9 * calibration.memory,
        element=element,
        tensor_cores=tensor_cores,
        half=by_precision(precision, lambda p: p.name == "fp16") > 0,
        matmul_slowdown=matmul,
        memory_slowdown=memory,
        overhead_slowdown=overhead,
    )


def slowdowns(cluster: Cluster, devices: Ints) -> tuple[Floats, Floats, Floats]:
    """How much longer matmuls, memory passes and small operators take with that many devices at work.

    As the probe measured it; else slots that want more cores than a node has take turns.
    """
    slots = np.minimum(devices, cluster.devices_per_machine).astype(np.float64)
    if cluster.contention:
        known = sorted(cluster.contention, key=lambda c: c.ranks)
        ranks = np.log([1.0, *(c.ranks for c in known)])
        measured = [[1.0, *(getattr(c, name) for c in known)] for name in ("matmul", "memory", "overhead")]
        a, b, c = (np.exp(np.interp(np.log(slots), ranks, np.log(values))) for values in measured)
        return a, b, c
    wanted = slots * cluster.device.cores / cluster.cores_per_node if cluster.cores_per_node else np.zeros(slots.shape)
    turns = np.maximum(1.0, wanted)
    return turns, turns, turns


def gemm_time(
    m: Floats | float,
    n: Floats | float,
    k: Floats | float,
    batch: Floats | float,
    rate: Rates,
    cluster: Cluster,
    unaligned: float,
) -> Floats:
    """Seconds of `batch` products m x k times k x n on one rank.

    GPU: the tiles of the output run in waves over the multiprocessors; the last wave and the
    edge tiles are paid in full, and sizes off the tensor cores' alignment run at `unaligned`
    of the peak. Never faster than the operands and the result pass through memory.
    """
    m, n, k, batch = (np.asarray(x, dtype=np.float64) for x in (m, n, k, batch))
    moved = batch * (m * k + k * n + m * n) * rate.element
    sms = cluster.device.multiprocessors
    operations = 2.0 * batch * m * n * k
    if not sms:
        return np.maximum(operations / rate.peak, moved / rate.bandwidth)
    per_sm = rate.peak / sms
    fill = np.where(rate.tensor_cores, TENSOR_FILL_K, PLAIN_FILL_K)
    rows, columns, relative = np.array(TILES).T[:, :, None]
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
    # A product with fewer tiles than multiprocessors is split along K as far as that pays.
    split = np.maximum(np.minimum(np.floor(sms / tiles), np.maximum(1.0, k / 512.0)), 1.0)
    waves = np.ceil(tiles * split / sms)
    tile = 2.0 * rows * columns * (k / split + fill) / (per_sm * relative)
    best = (waves * tile).min(axis=0)
    aligned = (n % ALIGNMENT == 0) & (k % ALIGNMENT == 0)
    slow = operations / (rate.peak * unaligned)
    best = np.where(rate.tensor_cores & ~aligned, np.maximum(best, slow), best)
    return np.asarray(np.maximum(best, moved / rate.bandwidth))


class LayerModel:
    """Times of one model's layer and head on one cluster under one stack."""

    def __init__(self, model: Model, seq_len: int, cluster: Cluster, stack: Stack, calibration: Calibration) -> None:
        self.model, self.seq_len = model, seq_len
        self.cluster, self.stack, self.calibration = cluster, stack, calibration
        self.table = MatmulTable(cluster.matmul) if cluster.matmul else None
        measured = cluster.attention if stack.flash_attention else ()
        self.attention = AttentionTable(measured) if measured else None

    def product(
        self, m: Floats | float, n: Floats | float, k: Floats | float, batch: Floats | float, rate: Rates
    ) -> Floats:
        """Seconds of products: from the probe's measured rates where the cluster has them."""
        if self.table is not None:
            operations = 2.0 * np.asarray(m) * np.asarray(n) * np.asarray(k) * np.asarray(batch)
            measured = self.table.rate(m, n, k, rate.element)
            return np.asarray(operations / (measured * self.calibration.gemm) * rate.matmul_slowdown)
        return gemm_time(m, n, k, batch, rate, self.cluster, self.calibration.unaligned) * rate.matmul_slowdown

    def layer(self, tp: Ints, mbs: Ints, sequence_parallel: Bools, rate: Rates) -> LayerTime:
        """One layer's forward and backward (weights and inputs), communication apart."""
        model, s = self.model, float(self.seq_len)
        t, b = tp.astype(np.float64), mbs.astype(np.float64)
        tokens, h = b * s, float(model.hidden)
        qkv = (model.attention_hidden + 2 * model.kv_hidden) / t
        up = model.ffn_hidden * (model.mlp_matrices - 1) / t
        shapes = ((qkv, h), (h, model.attention_hidden / t), (up, h), (h, model.ffn_hidden / t))
        forward = np.zeros(tp.shape)
        backward = np.zeros(tp.shape)
        for n, k in shapes:
            forward = forward + self.product(tokens, n, k, 1.0, rate)
            backward = backward + self.product(tokens, k, n, 1.0, rate) + self.product(k, n, tokens, 1.0, rate)
        attention_forward, attention_backward = self._attention(t, b, rate)
        memory_forward, memory_backward = self._memory_bound(t, b, sequence_parallel, rate)
        forward = forward + attention_forward + memory_forward + self._drawing(t, b, rate)
        backward = backward + attention_backward + memory_backward
        host_forward, host_backward = self._host(t, b, rate)
        if self.cluster.device.kind != "gpu":
            zero = np.zeros(tp.shape)
            return LayerTime(forward + host_forward, backward + host_backward, attention_forward, zero, zero)
        # The host launches ahead of the device: the slower of the two is what counts.
        idle_forward = np.maximum(host_forward - forward, 0.0)
        idle_backward = np.maximum(host_backward - backward, 0.0)
        return LayerTime(
            forward + idle_forward, backward + idle_backward, attention_forward, idle_forward, idle_backward
        )

    def head(self, vocab: Floats, tp: Ints, mbs: Ints, rate: Rates) -> tuple[Floats, Floats]:
        """Logits and cross-entropy, (forward, backward); nothing for a classifier."""
        if self.model.head == "classifier":
            zero = np.zeros(tp.shape)
            return zero, zero
        tokens, h, v = mbs * float(self.seq_len), float(self.model.hidden), vocab / tp
        forward = self.product(tokens, v, h, 1.0, rate)
        backward = self.product(tokens, h, v, 1.0, rate) + self.product(h, v, tokens, 1.0, rate)
        # Cast to fp32, maximum, exponential, sum; the gradient is written once and cast back.
        elements = tokens * v * self._per_byte(rate)
        if not self.stack.fp32_loss:
            return forward + elements * 2.0 * rate.element, backward + elements * 2.0 * rate.element
        return forward + elements * (rate.element + 16.0), backward + elements * (rate.element + 8.0)

    def embedding(self, mbs: Ints, rate: Rates) -> Floats:
        """Lookup, positions and dropout forward, and the scatter of the gradient backward."""
        moved = mbs * float(self.seq_len) * self.model.hidden * (6.0 * rate.element + 8.0)
        return moved * self._per_byte(rate)

    def _per_byte(self, rate: Rates) -> Floats:
        """Seconds a byte of the memory-bound passes takes.

        On a CPU whose allocator gives freed memory back to the system, every tensor written (half of what
        moves) is made of fresh pages, which the kernel zeroes at `fresh_gb_s`.
        """
        seconds = 1.0 / rate.bandwidth
        if self.cluster.device.kind == "cpu" and not self.stack.keeps_freed_memory:
            seconds += 0.5e-9 / self.calibration.fresh_gb_s
        return np.asarray(seconds * rate.memory_slowdown)

    def _drawing(self, t: Floats, b: Floats, rate: Rates) -> Floats | float:
        """Random numbers of a layer's dropouts on a CPU, where PyTorch draws them in one thread."""
        if not (self.stack.dropout and self.cluster.device.kind == "cpu"):
            return 0.0
        s = float(self.seq_len)
        drawn = 2.0 * b * s * self.model.hidden
        if not self.stack.flash_attention:
            drawn = drawn + b * self.model.heads / t * s * s
        seconds = self.calibration.random_cycles / ((self.cluster.device.clock_ghz or USUAL_CLOCK_GHZ) * 1e9)
        return drawn * seconds * rate.overhead_slowdown

    def _attention(self, t: Floats, b: Floats, rate: Rates) -> tuple[Floats, Floats]:
        """Scores and context: 4 b s^2 a d / t operations forward, twice that backward."""
        model, s, d = self.model, float(self.seq_len), float(self.model.head_dim)
        share = self._attention_share(rate)
        batch = b * model.heads / t
        if self.attention is not None:
            forward, backward = self.attention.time(batch, s, d, rate.element)
            return forward * rate.matmul_slowdown, backward * rate.matmul_slowdown
        if self.stack.flash_attention:
            # Causal kernels skip the masked half; backward recomputes the scores: 5 products for 2.
            operations = 2.0 * batch * s * s * d
            slower = rate.matmul_slowdown / (rate.peak * share)
            return operations * slower, 2.5 * operations * slower
        forward = self.product(s, s, d, batch, rate) + self.product(s, d, s, batch, rate)
        backward = 2.0 * self.product(s, s, d, batch, rate) + 2.0 * self.product(s, d, s, batch, rate)
        return forward / share, backward / share

    def _attention_share(self, rate: Rates) -> Floats | float:
        """Rate of the batched products over `gemm`.

        Strided-batched fp16 kernels of cuBLAS run far slower for head sizes 64 and 128 than for those
        beside them: document 004, h 14336 with 112 heads (of 128) against 128 heads (of 112), 139 against
        125 s; h 12288 with 96 (of 128) against 128 (of 96), 145 against 129 s; vTrain's models agree.
        """
        d = self.model.head_dim
        if self.stack.flash_attention or self.cluster.device.kind != "gpu" or d < 128 or d & (d - 1):
            return self.calibration.attention
        return np.where(rate.half, self.calibration.attention_pow2, self.calibration.attention)

    def fused_softmax(self, t: Floats, b: Floats, rate: Rates) -> Bools:
        """Whether Megatron's fused kernel takes the scores: 16 bit, (a/t) b in fours, s within its limit."""
        stack, s = self.stack, self.seq_len
        eligible = ((self.model.heads / t * b) % 4 == 0) & (rate.element < 4)
        return np.asarray(eligible & (stack.fused_softmax and 16 < s <= stack.fused_softmax_max_seq and s % 4 == 0))

    def _memory_bound(self, t: Floats, b: Floats, sequence_parallel: Bools, rate: Rates) -> tuple[Floats, Floats]:
        """Norms, biases, activation, dropout, residual, softmax: passes over each tensor times its bytes.

        A pass is one read or one write of every element; counts follow the kernels' reads and writes.
        """
        model, stack, s = self.model, self.stack, float(self.seq_len)
        tokens = b * s
        hidden = tokens * model.hidden / np.where(sequence_parallel, t, 1.0) * rate.element
        wide = tokens * model.ffn_hidden / t * rate.element
        norm = (4.0, 6.0) if stack.fused_layernorm else (4.0, 8.0)
        eager = stack.framework == "torch" and not stack.fused_layernorm and self.cluster.device.kind == "gpu"
        residual = (7.0, 5.0) if stack.dropout else (6.0, 2.0)
        gelu = (2.0, 3.0) if stack.fused_gelu else (4.0, 5.0)
        if model.mlp == "swiglu":
            gelu = (gelu[0] + 2.0, gelu[1] + 3.0)
        forward = hidden * (norm[0] + residual[0]) + wide * gelu[0]
        backward = hidden * (norm[1] + residual[1]) + wide * gelu[1]
        if eager and model.norm == "rmsnorm":
            forward = forward + hidden / rate.element * EAGER_RMS_NORM_BYTES[0]
            backward = backward + hidden / rate.element * EAGER_RMS_NORM_BYTES[1]
        if model.positions == "rotary":
            turned = tokens * (model.attention_hidden + model.kv_hidden) / t
            turned = turned * (EAGER_ROTARY_BYTES if eager else 2.0 * rate.element)
            forward, backward = forward + turned, backward + turned
        if not stack.flash_attention:
            scores = b * (model.heads / t) * s * s * rate.element
            fused = self.fused_softmax(t, b, rate)
            # Fused: softmax with its scale and mask, then dropout. Unfused they pass one by one, with casts
            # to fp32 and back where the stack wants its softmax in it.
            casts = 5.0 if stack.fp32_softmax else 0.0
            dropout = 2.5 if stack.dropout else 0.0
            forward = forward + scores * (np.where(fused, 2.0, 6.0 + casts) + dropout)
            backward = backward + scores * (np.where(fused, 3.0, 6.5 + casts) + dropout)
        per_byte = self._per_byte(rate)
        return forward * per_byte, backward * per_byte

    def _host(self, t: Floats, b: Floats, rate: Rates) -> tuple[Floats, Floats]:
        """Host time of a layer: its operators, forward and backward, times `op_us`.

        TP adds its two collectives; scores that no fused kernel takes add scale, mask, and two casts or copies.
        """
        operators = LAYER_OPERATORS + np.where(t > 1, 2.0, 0.0)
        if self.stack.fused_softmax and not self.stack.flash_attention:
            operators = operators + np.where(self.fused_softmax(t, b, rate), 0.0, UNFUSED_SOFTMAX_OPERATORS)
        forward = operators * self.calibration.op_us * 1e-6 * rate.overhead_slowdown
        return forward, BACKWARD_OPERATORS * forward
