"""Matrix products in the precision of their operands.

PyTorch has fp16 products on every CPU, but where the CPU has no fp16 arithmetic (AVX-512 without its fp16 part) they
run at 3 to 17 GFLOP/s beside 80 in fp32. On CPUs they go through fp32, which gives what a GPU's fp16 products give:
exact factors, sums in fp32, a single rounding. So do bf16 products where oneDNN has none, which wants AVX-512:
PyTorch's own take 10 to 200 times as long as in fp32 (EPYC 7003, a product of 2,048: 63 s and 0.3).

PyTorch passes fp32 products to MKL, whose best kernels are for Intel's processors alone: on an EPYC 9004 oneDNN
takes 7 to 15% less time for those of forward passes and input gradients, on an EPYC 9005 half the time for all.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from trimaran.protocol.host import first_processor
from trimaran.train.comm.device_kind import on_gpu


def amd_family(processor: Mapping[str, str]) -> int:
    """The family of an AMD processor, 25 for Zen 4 and 26 for Zen 5; 0 of any other maker's."""
    return int(processor.get("cpu family", 0)) if processor.get("vendor_id") == "AuthenticAMD" else 0


_FAMILY = amd_family(first_processor()) if torch.backends.mkldnn.is_available() else 0  # type: ignore[no-untyped-call]
PREFERS_ONEDNN = _FAMILY > 0
# From Zen 5 on cores compute 512 bits at once, of which MKL uses half on AMD's processors.
WIDE_CORES = _FAMILY >= 26
# Of more tokens at a time oneDNN's weight gradients take up to 1.3 times as long in fp32, and in bf16 on AMX 1.8 times;
# in bf16 without AMX the whole sum is up to 10% faster.
_TOKENS = 512
_HAS_AMX = torch.cpu._is_amx_tile_supported()
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
# Asked of x86 alone: an Arm processor has bf16 products of its own.
LACKS_BF16 = _IS_X86 and not (
    torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-untyped-call]
)


def goes_by_onednn(x: Tensor) -> bool:
    """Whether a product of `x` is faster by oneDNN than as PyTorch makes it."""
    return PREFERS_ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu"


def _adds_bias_by_onednn(x: Tensor) -> bool:
    """Whether oneDNN adds a bias to a product of `x` as it makes it.

    PyTorch copies the bias to every row of the result before: 2% of a bf16 step on AMX (docs/training-speed.md).
    """
    return _IS_X86 and x.dtype == torch.bfloat16 and x.device.type == "cpu" and not LACKS_BF16


def generates_code(x: Tensor) -> bool:
    """Whether products of `x` into given places, and weight gradients, run code that is generated for each shape."""
    in_bf16 = x.dtype == torch.bfloat16 and not on_gpu(x.device)
    return (in_bf16 and not LACKS_BF16) or (WIDE_CORES and goes_by_onednn(x))


def _by_onednn(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """X matrix^T + bias by the operator that torch.compile takes for a linear layer; autograd does not see it."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x.reshape(-1, x.shape[-1]), matrix, bias, "none", [], "")
    return reshaped(y, (*x.shape[:-1], y.shape[1]))


def goes_through_fp32(x: Tensor) -> bool:
    """Whether a product of `x` is made in fp32."""
    lacking = x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and LACKS_BF16)
    return lacking and not on_gpu(x.device)


def reshaped(y: Tensor, shape: Sequence[int]) -> Tensor:
    """What a function of ours gives in another shape, and no view of it: whoever is given it may write to it."""
    shaped: Tensor = torch.ops.aten._unsafe_view(y, list(shape))
    return shaped


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """(.., in) and (out, in) -> (.., out)."""
    if goes_by_onednn(x) or (bias is not None and _adds_bias_by_onednn(x)):
        return _by_onednn(x, matrix, bias)
    if not goes_through_fp32(x):
        return reshaped(functional.linear(x, matrix, bias), (*x.shape[:-1], len(matrix)))
    return linear(x.float(), matrix.float(), None if bias is None else bias.float()).to(x.dtype)


def product(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """(.., n) and (n, m) -> (.., m), written to `out` where that is given."""
    if goes_by_onednn(x) and (out is None or WIDE_CORES):
        made = _by_onednn(x, y.t())
        return made if out is None else out.copy_(made)
    if not goes_through_fp32(x):
        return torch.matmul(x, y, out=out)
    in_fp32 = product(x.float(), y.float())
    return in_fp32.to(x.dtype) if out is None else out.copy_(in_fp32)


def add_product(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add dy^T x to what is there: `total` (out, in), `dy` (tokens, out) and `x` (tokens, in)."""
    if goes_through_fp32(x) and total.dtype == torch.float32:
        add_product(total, dy.float(), x.float())
    elif goes_through_fp32(x):
        total.add_(dy.t().float() @ x.float())
    elif total.dtype != x.dtype:
        total.add_(dy.t() @ x)
    elif WIDE_CORES and goes_by_onednn(x):
        for begin in range(0, len(x), _TOKENS):
            total.add_(_by_onednn(dy[begin : begin + _TOKENS].t(), x[begin : begin + _TOKENS].t()))
    else:
        step = _TOKENS if _HAS_AMX and x.dtype == torch.bfloat16 and not on_gpu(x.device) else len(x)
        for begin in range(0, len(x), step):
            total.addmm_(dy[begin : begin + step].t(), x[begin : begin + step])
