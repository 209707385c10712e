"""What a single rank is measured with: matrix products, attention, memory, small operators."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from trimaran.nouns.hardware.measured import AttentionTime, MatmulRate
from trimaran.nouns.precision import PRECISIONS, PROBED_RATES, ProbedRate
from trimaran.probe.probe_settings import MIB, AttentionShape, ProbedProduct, ProbeSettings
from trimaran.probe.timing import Timing
from trimaran.train.comm.device_kind import lacks_eight_bit
from trimaran.train.model.block_attention import Scores, causal_attention, is_faster_in_blocks
from trimaran.train.model.mixture.blocks import make_code
from trimaran.train.model.narrow import Cast, cast, narrow_matrix_product
from trimaran.train.model.product import add_product, linear, product
from trimaran.train.process.allocator import bytes_in_use

DTYPES: dict[ProbedRate, torch.dtype] = {rate: getattr(torch, PRECISIONS[rate].dtype) for rate in PROBED_RATES}
_CHAIN = 32
# What a pass over a model reads and writes until it comes back to the same weights, more than most caches hold.
_PASS_BYTES = 64 * MIB
# Size and number of the tensors that passes over activations are timed with: what a layer of a small model passes over
# within a few operators. On two cores with 32 MiB of cache for both, two ranks take 1.0 to 1.2 times as long for these
# and for a step of the laptop's recipe, and up to 1.8 times for arrays that no cache holds.
_ACTIVATION_BYTES, _ACTIVATIONS = MIB, 8
# Widths of experts for which code is generated one after the other, each of which makes shapes of its own.
_CODE_WIDTHS = (512, 480, 448)


class Operands:
    """Random matrices cut out of one buffer a precision, since making them costs more than a product.

    A product takes another second matrix and result each time, until it has been through the buffer: in a training the
    operator before has just written what a product multiplies, but weights, what a layer read, and gradients that are
    added to have not been touched for a pass. A core of a Xeon 6 multiplies 256 tokens at 142 GFLOP/s with what its
    cache holds, and at 118 to 130 with what it does not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[torch.dtype, Tensor] = {}
        self._totals: dict[torch.dtype, Tensor] = {}

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A (rows, columns) matrix that begins `offset` elements into the buffer."""
        return self._cut(self._pools, torch.randn, rows, columns, dtype, offset)

    def product(self, case: ProbedProduct, dtype: torch.dtype) -> Callable[[], Tensor]:
        """One matrix product with its operands laid out as training has them, made as Trimaran's trainer makes it."""
        # a training keeps what a product makes, so that the next one's goes elsewhere
        kept: deque[Tensor] = deque(maxlen=_sets(case, dtype))

        def made(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
            if case.orientation == "weight_gradient":
                add_product(total, left, right)
                return total
            kept.append((linear if case.orientation == "forward" else product)(left, right))
            return kept[-1]

        return self._in_turns(case, dtype, made)

    def plain_product(self, case: ProbedProduct, dtype: torch.dtype) -> Callable[[], Tensor]:
        """The same product as PyTorch makes it.

        The result goes where one before it went: whether a fresh one costs page faults
        hangs on what the process did before, and is no property of the product.
        """

        def made(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
            if case.orientation == "forward":
                right = right.t()
            elif case.orientation == "weight_gradient":
                left = left.t()
            return torch.mm(left, right, out=total)

        return self._in_turns(case, dtype, made)

    def _in_turns(
        self, case: ProbedProduct, dtype: torch.dtype, made: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Callable[[], Tensor]:
        """`made` of tokens and the matrix (out, in), or the tokens' gradient and they, as they lie in memory.

        The third matrix is of the result's shape, and holds zeros at first.
        """
        m, n, k = case.m, case.n, case.k
        left = (k, m) if case.orientation == "weight_gradient" else (m, k)
        right = (n, k) if case.orientation == "forward" else (k, n)
        sets = [
            (
                self.matrix(*right, dtype, offset=m * k + number * k * n),
                self._cut(self._totals, torch.zeros, m, n, dtype, number * m * n),
            )
            for number in reversed(range(_sets(case, dtype)))
        ]
        tokens, turns = self.matrix(*left, dtype), cycle(sets)
        return lambda: made(tokens, *next(turns))

    def _cut(
        self,
        pools: dict[torch.dtype, Tensor],
        filled: Callable[..., Tensor],
        rows: int,
        columns: int,
        dtype: torch.dtype,
        offset: int,
    ) -> Tensor:
        end = offset + rows * columns
        pool = pools.get(dtype)
        if pool is None or pool.numel() < end:
            size = max(end, _PASS_BYTES // dtype.itemsize)
            pool = pools[dtype] = filled(size, device=self._device, dtype=dtype)
        return pool[offset:end].view(rows, columns)


def _sets(case: ProbedProduct, dtype: torch.dtype) -> int:
    """How many second matrices and results make up a pass."""
    m, n, k = case.m, case.n, case.k
    return max(1, (_PASS_BYTES // dtype.itemsize - m * k) // (k * n + m * n))


ProductCase = tuple[ProbedRate, ProbedProduct]
AttentionCase = tuple[ProbedRate, AttentionShape, bool]
# Beside attention: reading two large arrays and writing a third, and a chain of small operators.
KernelCase = AttentionCase | Literal["stream", "chain"]


def products_timing(settings: ProbeSettings, device: torch.device) -> Timing[ProductCase]:
    """Every product in every precision: the trainer's, or PyTorch's where the settings ask for plain ones."""

    def preparing() -> Callable[[ProductCase], Callable[[], object]]:
        operands = Operands(device)
        made = operands.plain_product if settings.plain_products else operands.product
        return lambda case: made(case[1], DTYPES[case[0]])

    cases = [(precision, case) for case in settings.products for precision in settings.precisions]
    return Timing(cases, preparing, settings.rounds, device, settings.limit_s, work=_operations)


def _operations(case: ProductCase) -> tuple[Hashable, float]:
    """Precision and orientation of a product, and how many operations it is."""
    precision, product = case
    return (precision, product.orientation), 2.0 * product.m * product.n * product.k


def matmul_rates(seconds: Mapping[ProductCase, float], left_out: Iterable[ProductCase] = ()) -> tuple[MatmulRate, ...]:
    """TFLOP/s of the products that were timed.

    Orientations that share a shape share a row, with the time of their mean; none where one of them was `left_out`,
    which is the slowest. A weight gradient is given under its transposed shape too: it is the same product seen from
    the other side.
    """
    lacking = {(precision, case.m, case.n, case.k) for precision, case in left_out}
    by_shape: dict[tuple[ProbedRate, int, int, int], list[float]] = defaultdict(list)
    for (precision, case), time_s in seconds.items():
        by_shape[precision, case.m, case.n, case.k].append(time_s)
        if case.orientation == "weight_gradient" and case.m != case.n:
            by_shape[precision, case.n, case.m, case.k].append(time_s)
    return tuple(
        MatmulRate(precision=precision, m=m, n=n, k=k, tflops=2.0 * m * n * k * len(times) / sum(times) / 1e12)
        for (precision, m, n, k), times in by_shape.items()
        if (precision, m, n, k) not in lacking
    )


def eight_bit_timing(settings: ProbeSettings, device: torch.device) -> Timing[ProbedProduct]:
    """Forward products of matrices that are 8 bit already; none on a GPU that has no such products.

    CPUs have them too, made of others and slower than in bf16, which no plan should choose: none there as well.
    """
    lacking = device.type != "cuda" or lacks_eight_bit(device) is not None
    return eight_bit_products([] if lacking else settings.products, settings.rounds, device, settings.limit_s)


def eight_bit_products(
    products: Sequence[ProbedProduct], rounds: int, device: torch.device, limit_s: float = math.inf
) -> Timing[ProbedProduct]:
    """The same on a device that has such products."""

    def preparing() -> Callable[[ProbedProduct], Callable[[], object]]:
        operands = Operands(device)

        def prepare(case: ProbedProduct) -> Callable[[], Tensor]:
            left: Cast = cast(operands.matrix(case.m, case.k, torch.bfloat16))
            right = cast(operands.matrix(case.n, case.k, torch.bfloat16, offset=case.m * case.k))
            return lambda: narrow_matrix_product(left, right)

        return prepare

    forward = [case for case in products if case.orientation == "forward"]
    return Timing(forward, preparing, rounds, device, limit_s)


def eight_bit_tflops(seconds: Mapping[ProbedProduct, float]) -> float:
    """The best TFLOP/s of the 8-bit products that were timed; 0 where there was none."""
    return max((2.0 * case.m * case.n * case.k / time_s / 1e12 for case, time_s in seconds.items()), default=0.0)


def kernels_timing(settings: ProbeSettings, device: torch.device) -> Timing[KernelCase]:
    """The stream, the chain, and causal attention, forward and backward.

    In the kernel that PyTorch picks, or in blocks where Trimaran's trainer goes by those and the settings ask for no
    plain ones.
    """

    def prepare(case: KernelCase) -> Callable[[], object]:
        if case == "stream":
            return stream(settings.stream_mib, device)
        if case == "chain":
            return small_operators(device)
        precision, shape, backward = case
        size = (1, shape.batch_heads, shape.seq_len, shape.head_dim)
        q, k, v = (torch.randn(size, device=device, dtype=DTYPES[precision], requires_grad=backward) for _ in range(3))

        in_blocks = not settings.plain_products and is_faster_in_blocks(q, k, v, None)

        def forward() -> Tensor:
            if in_blocks:
                return causal_attention(q, k, v, Scores(shape.head_dim**-0.5))
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        if not backward:
            return forward
        y = forward()
        dy = torch.randn_like(y)
        return lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)

    # the limit is meant for attention: the other two are long done when it ends
    cases: list[KernelCase] = ["stream", "chain"]
    cases += [
        (rate, shape, back) for rate in settings.precisions for shape in settings.attention for back in (False, True)
    ]
    return Timing(cases, lambda: prepare, settings.rounds, device, settings.limit_s)


def attention_times(seconds: Mapping[KernelCase, float]) -> tuple[AttentionTime, ...]:
    """Microseconds of the shapes that were timed; those whose backward the limit did not reach are left out."""
    both = ((case, case[0], case[1]) for case in seconds if not isinstance(case, str) and case[2])
    return tuple(
        AttentionTime(
            precision=precision,
            **shape.model_dump(),
            forward_us=seconds[precision, shape, False] * 1e6,
            backward_us=seconds[case] * 1e6,
        )
        for case, precision, shape in both
    )


def stream(mib: int, device: torch.device) -> Callable[[], Tensor]:
    """C = a + b over arrays of `mib` MiB each."""
    count = mib * MIB // 4
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    return lambda: torch.add(a, b, out=c)


def memory_bandwidth_gb_s(seconds: Mapping[KernelCase, float], mib: int) -> float:
    """1e9 bytes/s of the stream over arrays of `mib` MiB."""
    return 3 * mib * MIB / seconds["stream"] / 1e9


def activation_passes(device: torch.device) -> Callable[[], object]:
    """Sums of activations, one after the other, each of two that were made before it.

    A layer reads most of what it made a few operators before, from a cache where one holds so much.
    """
    count = _ACTIVATION_BYTES // 4
    tensors = [torch.ones(count, device=device) for _ in range(_ACTIVATIONS)]

    def run() -> object:
        for place, out in enumerate(tensors):
            torch.add(tensors[place - 1], tensors[place - 2], out=out)
        return tensors

    return run


def small_operators(device: torch.device) -> Callable[[], object]:
    """A chain of tiny operators, forward and backward."""
    x = torch.ones(8, device=device, requires_grad=True)
    w = torch.ones(8, device=device)

    def run() -> object:
        y = x
        for _ in range(_CHAIN):
            y = y * w
        return torch.autograd.grad(y, x, w)

    return run


def op_overhead_us(seconds: Mapping[KernelCase, float]) -> float:
    """Microseconds of one small operator in a training's forward and backward, mean of both."""
    return seconds["chain"] / (2 * _CHAIN) * 1e6


def experts_code_mib(precisions: Sequence[ProbedRate], device: torch.device) -> dict[ProbedRate, float]:
    """MiB that stay with the code that is generated for one shape of experts' matrices; empty where none is.

    A mean over shapes behind a first one, whose own first product takes what is taken once.
    """
    taken = {}
    for precision in precisions:
        dtype = DTYPES[precision]
        in_use = []
        for width in _CODE_WIDTHS:
            make_code(_CODE_WIDTHS[0], width, dtype, dtype, device)
            in_use.append(bytes_in_use() or 0)
        grown = (in_use[-1] - in_use[0]) / (len(in_use) - 1) / MIB
        if grown > 1.0:
            taken[precision] = grown
    return taken
