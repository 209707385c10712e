"""Kernels: how long a rank takes for an operator's products, passes over memory and launches.

All functions take arrays over layouts and return seconds of the same shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np

from trimaran.cost.calibration import SLOWED_BY_TRAFFIC
from trimaran.cost.case import Case
from trimaran.cost.grid import Bools, Floats, Ints, any_narrow, by_precision
from trimaran.cost.measured import AttentionTable, MatmulTable
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.precision import PRECISIONS, Precision
from trimaran.nouns.stack import FlashKernel
from trimaran.operators.casts import casts_of
from trimaran.operators.graphs import launched
from trimaran.operators.modules import shares_again
from trimaran.operators.operator import Operator, Product

# Output tiles of the GEMM libraries and their rate relative to the best one; a small tile reloads
# its operands more often. NVIDIA, Deep Learning Performance Guide, matrix multiplication.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.80), (64, 64, 0.62))
_TILE_ROWS, _TILE_COLUMNS, _TILE_RATES = np.array(TILES).T[:, :, None]
_TILE_OPERATIONS = 2.0 * _TILE_ROWS * _TILE_COLUMNS
# Elements of K that the prologue and the epilogue of a tile cost: on tensor cores, and without.
TENSOR_FILL_K, PLAIN_FILL_K = 96.0, 24.0
# Operators that autograd runs for one of the forward pass.
BACKWARD_LAUNCHES = 1.4
# Clock of a CPU whose cluster file states none.
USUAL_CLOCK_GHZ = 2.5
# Rate of flash attention's forward over that of its backward, by whose kernel it is, on GPUs. FlashAttention-2 reaches
# 73 and 63% of an A100's peak; Triton's takes 1.3 to 1.5 times as long forward and twice as long backward (Dao, arXiv
# 2307.08691, sections 1 and 4.1). Of cuDNN's nothing is published, so both are alike.
FORWARD_RATE: dict[FlashKernel, float] = {"flash": 73 / 63, "triton": 73 / 63 * 2.0 / 1.4, "cudnn": 1.0}
# Tensor cores want sizes in multiples of 16 bytes.
ALIGNMENT = 8


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer on one rank for one micro-batch, without communication; arrays.

    `forward_again` is the forward of what full recompute makes again. `idle_forward` and `idle_backward` are the parts
    in which a GPU waits for its host to launch more.
    """

    forward: Floats
    backward: Floats
    forward_again: Floats
    idle_forward: Floats
    idle_backward: Floats


@dataclass(frozen=True)
class ProductRates:
    """What one rank multiplies in one format: arrays over layouts.

    `peak` operations/s, `operand` and `result` bytes of an element that is read and written, `fill_k` the elements of
    K that prologue and epilogue of a tile take as long as. `plain` operations/s are those without tensor cores.
    """

    peak: Floats
    operand: Floats
    result: Floats
    fill_k: Floats
    tensor_cores: Bools
    plain: float


@dataclass(frozen=True)
class Rates:
    """What one rank computes and moves: arrays over layouts.

    `products` are those of attention and head, `narrow` those of the layers' linear products; `bandwidth` bytes/s of
    passes over activations, `stream` of those over weights and states, `element` bytes of an activation. The slowdowns
    are how much longer a rank takes because of the others of its node: 1 on a GPU, more where slots share cores;
    `memory` is of weights and states, `pass` of activations.
    """

    products: ProductRates
    narrow: ProductRates
    bandwidth: float
    stream: float
    element: Floats
    half: Bools
    matmul_slowdown: Floats
    memory_slowdown: Floats
    pass_slowdown: Floats
    overhead_slowdown: Floats

    def streamed(self, moved: Floats) -> Floats:
        """Seconds in which so many bytes of weights and states pass through memory."""
        return moved / self.stream * self.memory_slowdown

    def passed(self, moved: Floats | float) -> Floats:
        """Seconds in which so many bytes of activations do."""
        return moved / self.bandwidth * self.pass_slowdown


class Slowdowns(NamedTuple):
    """How much longer a rank takes because of the others of its node, by what it does; see Rates."""

    matmul: Floats
    memory: Floats
    passes: Floats
    overhead: Floats


def rates(case: Case, precision: Ints, devices: Ints | Floats, lone: Bools | bool = False) -> Rates:
    """Ceilings of a rank under each layout's precision (index into PRECISIONS) and device count.

    What a stack gathers beside its products slows them, and a `lone` rank, whose weights no other has, gathers nothing.
    """
    device, calibration = case.cluster.device, case.calibration
    peaks = [(device.peak(known.wide) or 0.0) * 1e12 for known in PRECISIONS.values()]
    peak = np.array([p or min(filter(None, peaks)) for p in peaks])[precision]
    on_cpu = device.kind == "cpu"
    element = by_precision(precision, lambda p: p.cpu_product_bytes if on_cpu else p.activation_bytes)
    slower = slowdowns(case.cluster, devices)
    tensor_cores = (element < 4) & (device.kind == "gpu")
    plain = (element == 4) & (device.kind == "gpu")
    fill = np.where(tensor_cores, TENSOR_FILL_K, PLAIN_FILL_K)
    beside = case.stack.gathers_beside_products and not on_cpu
    undisturbed = np.where(lone, SLOWED_BY_TRAFFIC, 1.0) if beside else 1.0
    reached = peak * np.where(plain, calibration.gemm_plain, calibration.gemm * undisturbed)
    without = (device.peak("fp32") or 0.0) * 1e12 * calibration.gemm_plain
    products = ProductRates(reached, element, element, fill, tensor_cores, without)
    return Rates(
        products=products,
        narrow=_narrow(case, products, precision),
        bandwidth=device.mem_bandwidth_gb_s * 1e9 * calibration.memory,
        # a probe's is that of one kernel over large arrays, as an optimizer's is; layers' passes reach a part of it
        stream=device.mem_bandwidth_gb_s * 1e9 * (1.0 if on_cpu and case.cluster.matmul else calibration.memory),
        element=element,
        half=by_precision(precision, lambda p: p.name == "fp16") > 0,
        matmul_slowdown=slower.matmul,
        memory_slowdown=slower.memory,
        pass_slowdown=slower.passes,
        overhead_slowdown=slower.overhead,
    )


def _narrow(case: Case, products: ProductRates, precision: Ints) -> ProductRates:
    """Rates of the layers' linear products: those of all others, or of the precision's narrow format.

    A device that reaches less of its narrow peak than of its 16-bit one does so here too. What a tile's prologue and
    epilogue take is time, so more elements of K at a higher rate.
    """
    device = case.cluster.device
    if not any_narrow(precision):
        return products
    share = device.narrow_share / device.matmul_share if device.narrow_share and device.matmul_share else 1.0

    def faster(known: Precision) -> float:
        narrow, wide = device.peak(known.name), device.peak(known.wide)
        return narrow / wide * share if known.narrow is not None and narrow and wide else 1.0

    def read(known: Precision) -> float:
        return float(casts_of(known, case.stack, device).element)

    times, cast = by_precision(precision, faster), by_precision(precision, read)
    operand = np.where(cast > 0, cast, products.operand)
    return replace(products, peak=products.peak * times, operand=operand, fill_k=products.fill_k * times)


def slowdowns(cluster: Cluster, devices: Ints | Floats) -> Slowdowns:
    """How much longer ranks take with so many devices at work.

    As the probe measured it, of up to so many slots; more of them take turns, as those do that want more cores than a
    node has where nothing was measured.
    """
    slots = np.minimum(devices, cluster.devices_per_machine).astype(np.float64)
    turns = np.maximum(1.0, slots * cluster.core_share)
    if cluster.contention:
        known = sorted(cluster.contention, key=lambda c: c.ranks)
        ranks = np.log([1.0, *(c.ranks for c in known)])
        measured = zip(*((c.matmul, c.memory, c.of_passes, c.overhead) for c in known), strict=True)
        beyond = turns / np.maximum(1.0, np.minimum(slots, known[-1].ranks) * cluster.core_share)
        return Slowdowns(
            *(beyond * np.exp(np.interp(np.log(slots), ranks, np.log([1.0, *values]))) for values in measured)
        )
    return Slowdowns(turns, turns, turns, turns)


def gemm_time(
    m: Floats | float,
    n: Floats | float,
    k: Floats | float,
    batch: Floats | float,
    rate: ProductRates,
    bandwidth: float,
    cluster: Cluster,
    unaligned: float,
) -> Floats:
    """Seconds of `batch` products m x k times k x n on one rank.

    GPU: the tiles of the output run in waves over the multiprocessors; the last wave and the
    edge tiles are paid in full, and sizes off the tensor cores' alignment run at `unaligned`
    of the peak, which is known of attention's batches alone (document 004, heads of 150). One product is no slower than
    without tensor cores: before cuBLAS 11 it ran so, since then it never has to (NVIDIA, Matrix Multiplication
    Background, table 1). Never faster than the operands and the result pass through memory.
    """
    m, n, k, batch = (np.asarray(x, dtype=np.float64) for x in (m, n, k, batch))
    moved = batch * ((m * k + k * n) * rate.operand + m * n * rate.result)
    sms = cluster.device.multiprocessors
    operations = 2.0 * batch * m * n * k
    if not sms:
        return np.maximum(operations / rate.peak, moved / bandwidth)
    per_sm = rate.peak / sms
    tiles = np.ceil(m / _TILE_ROWS) * np.ceil(n / _TILE_COLUMNS) * batch
    # A product with fewer tiles than multiprocessors is split along K as far as that pays.
    split = np.maximum(np.minimum(np.floor(sms / tiles), np.maximum(1.0, k / 512.0)), 1.0)
    waves = np.ceil(tiles * split / sms)
    tile = _TILE_OPERATIONS * (k / split + rate.fill_k) / (per_sm * _TILE_RATES)
    best = (waves * tile).min(axis=0)
    aligned = (n % ALIGNMENT == 0) & (k % ALIGNMENT == 0)
    if not aligned.all():
        slow = operations / np.maximum(rate.peak * unaligned, np.where(batch == 1, rate.plain, 0.0))
        best = np.where(rate.tensor_cores & ~aligned, np.maximum(best, slow), best)
    return np.asarray(np.maximum(best, moved / bandwidth))


def recomputed(operators: Sequence[Operator]) -> int:
    """How many operators run again where recompute stops once all that the backward wants is there.

    An operator's inputs are kept before it runs, so the last one that keeps anything does not run, unless it keeps
    something of its own making (PyTorch, torch/utils/checkpoint.py, set_checkpoint_early_stop).
    """
    kept = [index for index, operator in enumerate(operators) if operator.inputs or operator.inside]
    return kept[-1] + bool(operators[kept[-1]].inside)


class Kernels:
    """Times of operators on one cluster under one stack, at the rates of the layouts at hand."""

    def __init__(self, case: Case, rate: Rates) -> None:
        self.cluster, self.stack, self.calibration, self.rate = case.cluster, case.stack, case.calibration, rate
        self.matmul = MatmulTable(self.cluster.matmul) if self.cluster.matmul else None
        measured = self.cluster.attention if self.stack.flash_attention else ()
        self.attention = AttentionTable(measured) if measured else None

    def layer(self, operators: Sequence[Operator], times: Sequence[tuple[Floats, Floats]]) -> LayerTime:
        """One layer's forward and backward (weights and inputs), communication apart, by its operators' times."""
        forward, backward = (reduce(np.add, phase) for phase in zip(*times, strict=True))
        wanted = recomputed(operators) if self.stack.recompute_stops_early else len(operators)
        again = reduce(np.add, (there for there, _ in times[:wanted]))
        launch = self.calibration.op_us * 1e-6 * self.rate.overhead_slowdown
        host_forward, host_again = (launched(some, self.stack) * launch for some in (operators, operators[:wanted]))
        host_backward = BACKWARD_LAUNCHES * host_forward
        if self.cluster.device.kind != "gpu":
            zero = np.zeros(self.rate.element.shape)
            return LayerTime(forward + host_forward, backward + host_backward, again + host_again, zero, zero)
        # The host launches ahead of the device: the slower of the two is what counts.
        idle_forward = np.maximum(host_forward - forward, 0.0)
        idle_backward = np.maximum(host_backward - backward, 0.0)
        forward_again = np.maximum(again, host_again)
        return LayerTime(forward + idle_forward, backward + idle_backward, forward_again, idle_forward, idle_backward)

    def again(self, operators: Sequence[Operator], times: Sequence[tuple[Floats, Floats]], word: str) -> Floats:
        """Seconds by which what a partial recompute runs again makes one layer's backward longer.

        The stack's own selection ends as full recompute does. On a GPU host and device each run ahead of the other
        through all of the backward.
        """
        stops = word == "selective" and self.stack.recompute_stops_early
        wanted = recomputed(operators) if stops else len(operators)
        shares = shares_again(word, operators, self.stack)[:wanted]
        seconds = np.zeros(self.rate.element.shape)
        for share, (there, _) in zip(shares, times, strict=False):
            seconds = seconds + there * share
        some = [
            replace(operator, launches=operator.launches * share)
            for operator, share in zip(operators, shares, strict=False)
            if np.any(share)
        ]
        launch = self.calibration.op_us * 1e-6 * self.rate.overhead_slowdown
        host = launched(some, self.stack) * launch
        if self.cluster.device.kind != "gpu":
            return np.asarray(seconds + host)
        backward = reduce(np.add, (there for _, there in times))
        host_backward = BACKWARD_LAUNCHES * launched(operators, self.stack) * launch
        return np.asarray(np.maximum(backward + seconds, host_backward + host) - np.maximum(backward, host_backward))

    def time(self, operator: Operator) -> tuple[Floats, Floats]:
        """Seconds of one operator, (forward, backward), launches apart."""
        products = {
            "linear": self._linear, "one_by_one": self._one_by_one, "batched": self._batched, "flash": self._flash,
        }  # fmt: skip
        forward, backward = products[operator.kernel](operator)
        forward = forward + operator.moved_forward * self._per_byte + self._drawing(operator.drawn)
        return forward, backward + operator.moved_backward * self._per_byte

    def product(self, product: Product, rate: ProductRates) -> Floats:
        """Seconds of products: from the probe's measured rates where the cluster has them."""
        m, n, k, batch, slower = product.m, product.n, product.k, product.batch, self.rate.matmul_slowdown
        if self.matmul is not None:
            measured = self.matmul.rate(m, n, k, self.rate.element)
            return np.asarray(product.operations / (measured * self.calibration.gemm) * slower)
        unaligned = np.inf if product.ragged else self.calibration.unaligned
        return gemm_time(m, n, k, batch, rate, self.rate.bandwidth, self.cluster, unaligned) * slower

    def weight_gradient(self, operator: Operator) -> Floats:
        """Seconds of the product that makes the gradient of an operator's weights: the second of its backward."""
        rate, made = self.rate.narrow if operator.narrow else self.rate.products, operator.backward[1]
        if operator.kernel == "one_by_one":
            return np.asarray(self.product(replace(made, batch=1.0), rate) * made.batch)
        return self.product(made, rate)

    def _linear(self, operator: Operator) -> tuple[Floats, Floats]:
        rate = self.rate.narrow if operator.narrow else self.rate.products
        return self._sum(operator.forward, rate), self._sum(operator.backward, rate)

    def _one_by_one(self, operator: Operator) -> tuple[Floats, Floats]:
        """Each product of a batch alone on the device, one after the other."""
        count = operator.forward[0].batch
        one = {id(product): replace(product, batch=1.0) for product in (*operator.forward, *operator.backward)}
        alone = [tuple(one[id(product)] for product in phase) for phase in (operator.forward, operator.backward)]
        forward, backward = (self._sum(products, self.rate.narrow) * count for products in alone)
        return forward, backward

    def _batched(self, operator: Operator) -> tuple[Floats, Floats]:
        share = self._batched_share(float(operator.forward[0].k))
        products = self.rate.products
        return self._sum(operator.forward, products) / share, self._sum(operator.backward, products) / share

    def _flash(self, operator: Operator) -> tuple[Floats, Floats]:
        """Measured times where the cluster has them, else a rate; causal kernels skip the masked half."""
        rate, scores = self.rate, operator.forward[0]
        if self.attention is not None:
            forward, backward = self.attention.time(
                np.asarray(scores.batch), float(scores.m), float(scores.k), rate.element
            )
            # measured of whole sequences, of which a sliding window leaves a part
            slower = rate.matmul_slowdown * (scores.n / scores.m)
            return forward * slower, backward * slower
        slower = 0.5 * rate.matmul_slowdown / (rate.products.peak * self.calibration.attention)
        faster = FORWARD_RATE[self.stack.flash_kernel] if self.cluster.device.kind == "gpu" else 1.0
        forward, backward = (
            np.asarray(reduce(np.add, (product.operations for product in products)) * slower)
            for products in (operator.forward, operator.backward)
        )
        # the calibrated rate is that of both passes together
        apart = (forward + backward) / (forward + backward * faster)
        return forward * apart, backward * faster * apart

    def _sum(self, products: Sequence[Product], rate: ProductRates) -> Floats:
        """Seconds of products one after the other; those of one shape are timed once."""
        seconds = np.zeros(rate.peak.shape)
        shapes = {id(product): product for product in products}
        for shape, times in Counter(map(id, products)).items():
            seconds = seconds + times * self.product(shapes[shape], rate)
        return seconds

    def _batched_share(self, head_dim: float) -> Floats | float:
        """Rate of the batched products over `gemm`.

        Strided-batched fp16 kernels of cuBLAS run far slower for head sizes 64 and 128 than for those
        beside them: BigScience's BLOOM sweep, h 14336 with 112 heads (of 128) against 128 heads (of 112), 139 against
        125 s; h 12288 with 96 (of 128) against 128 (of 96), 145 against 129 s; vTrain's models agree.
        """
        size = int(head_dim)
        if self.cluster.device.kind != "gpu" or size < 128 or size & (size - 1):
            return self.calibration.attention
        return np.where(self.rate.half, self.calibration.attention_pow2, self.calibration.attention)

    @cached_property
    def _per_byte(self) -> Floats:
        """Seconds a byte of the memory-bound passes takes.

        On a CPU whose allocator gives freed memory back to the system, every tensor written (half of what
        moves) is made of fresh pages, which the kernel zeroes at `fresh_gb_s`.
        """
        seconds = 1.0 / self.rate.bandwidth
        if self.cluster.device.kind == "cpu" and not self.stack.keeps_freed_memory:
            seconds += 0.5e-9 / self.calibration.fresh_gb_s
        return np.asarray(seconds * self.rate.pass_slowdown)

    def _drawing(self, drawn: Floats | float) -> Floats | float:
        """Random numbers of dropouts on a CPU, where PyTorch draws them in one thread."""
        if self.cluster.device.kind != "cpu":
            return 0.0
        seconds = self.calibration.random_cycles / ((self.cluster.device.clock_ghz or USUAL_CLOCK_GHZ) * 1e9)
        return drawn * seconds * self.rate.overhead_slowdown
