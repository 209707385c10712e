"""Matrix products in the precision of their operands.

PyTorch has fp16 products on every CPU, but where the CPU has no fp16 arithmetic they run at 3 to 17 GFLOP/s beside 80
in fp32 (AVX-512 without its fp16 part). There they go through fp32, which gives what a GPU's fp16 products give:
exact factors, sums in fp32, one rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def goes_through_fp32(x: Tensor) -> bool:
    """Whether a product of `x` is made in fp32."""
    return x.dtype == torch.float16 and not x.is_cuda


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """(.., in) and (out, in) -> (.., out)."""
    if not goes_through_fp32(x):
        return functional.linear(x, matrix, bias)
    return functional.linear(x.float(), matrix.float(), None if bias is None else bias.float()).to(x.dtype)


def product(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """(.., n) and (n, m) -> (.., m), written to `out` where that is given."""
    if not goes_through_fp32(x):
        return torch.matmul(x, y, out=out)
    made = x.float() @ y.float()
    return made.to(x.dtype) if out is None else out.copy_(made)
