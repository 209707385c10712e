"""Matrix products in the precision of their operands.

PyTorch has fp16 products on every CPU, but where the CPU has no fp16 arithmetic (AVX-512 without its fp16 part) they
run at 3 to 17 GFLOP/s beside 80 in fp32. On CPUs they go through fp32, which gives what a GPU's fp16 products give:
exact factors, sums in fp32, a single rounding.

PyTorch passes fp32 products to MKL, whose best kernels are for Intel's processors alone: on an EPYC 9004 oneDNN
takes 7 to 15% less time for those of forward passes and input gradients.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from trimaran.train.comm.device_kind import on_gpu

CPUINFO = Path("/proc/cpuinfo")


def _is_amd() -> bool:
    """Whether Linux says that the processor is AMD's; its maker stands in the first lines."""
    try:
        with CPUINFO.open() as lines:
            return "AuthenticAMD" in lines.read(256)
    except OSError:
        return False


PREFERS_ONEDNN = torch.backends.mkldnn.is_available() and _is_amd()  # type: ignore[no-untyped-call]


def goes_by_onednn(x: Tensor) -> bool:
    """Whether a product of `x` is faster by oneDNN than as PyTorch makes it."""
    return PREFERS_ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu"


def _by_onednn(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """X matrix^T + bias by the operator that torch.compile takes for a linear layer; autograd does not see it."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x.reshape(-1, x.shape[-1]), matrix, bias, "none", [], "")
    # no view of `y`: whoever is given the result may write to it
    shaped: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[1]])
    return shaped


def goes_through_fp32(x: Tensor) -> bool:
    """Whether a product of `x` is made in fp32."""
    return x.dtype == torch.float16 and not on_gpu(x.device)


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """(.., in) and (out, in) -> (.., out)."""
    if goes_by_onednn(x):
        return _by_onednn(x, matrix, bias)
    if not goes_through_fp32(x):
        return functional.linear(x, matrix, bias)
    return functional.linear(x.float(), matrix.float(), None if bias is None else bias.float()).to(x.dtype)


def product(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """(.., n) and (n, m) -> (.., m), written to `out` where that is given."""
    if out is None and goes_by_onednn(x):
        return _by_onednn(x, y.t())
    if not goes_through_fp32(x):
        return torch.matmul(x, y, out=out)
    in_fp32 = x.float() @ y.float()
    return in_fp32.to(x.dtype) if out is None else out.copy_(in_fp32)
