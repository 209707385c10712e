"""Products whose factors are cast to 8 bit: weights and what layers read to E4M3, gradients to E5M2.

Each matrix has one scale, by which its largest value becomes the largest of the format (arXiv 2209.05433, section 3.1),
found anew for each cast: nothing of an earlier step is kept, so that a resumed training and a micro-batch made again
compute the same. A scale is that of what the rank itself multiplies; a layout that cuts a matrix gives each part a
scale of its own and so rounds otherwise. Results leave in the type of what was cast.

The products are PyTorch's own (`torch._scaled_mm`), which a CPU has by fp32: slowly, but with the same numbers.
Hopper's tensor cores read both factors along the dimension that is summed over alone, so a factor whose sum goes the
other way is turned once it is cast (`Cast.turned`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trimaran.train.model.product import reshaped

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
# Kernels read 16 bytes at a time: torch 2.13.0, aten/src/ATen/native/cuda/ScaledBlas.cpp, refuses other widths.
MULTIPLE = 16
# A matrix of zeros has no largest value to divide by; below this scale values of 16 bit vanish anyway.
LEAST_SCALE = 1e-30


@dataclass(frozen=True)
class Cast:
    """A matrix in 8 bit, padded by zeros: `values` times `scale` is about the (rows, columns) that were cast."""

    values: Tensor
    scale: Tensor
    rows: int
    columns: int
    wide: torch.dtype

    def turned(self) -> Cast:
        """The transposed matrix, lying row by row."""
        return Cast(self.values.t().contiguous(), self.scale, self.columns, self.rows, self.wide)


def cast(x: Tensor, to: torch.dtype = FORWARD) -> Cast:
    """(.., columns) as a matrix in 8 bit. What is not finite makes the products of the whole matrix so."""
    matrix = x.reshape(-1, x.shape[-1])
    rows, columns = matrix.shape
    largest = torch.linalg.vector_norm(matrix, float("inf")).float()
    scale = (largest / torch.finfo(to).max).clamp_(min=LEAST_SCALE)
    if rows % MULTIPLE or columns % MULTIPLE:
        matrix = functional.pad(matrix, (0, -columns % MULTIPLE, 0, -rows % MULTIPLE))
    return Cast((matrix / scale).to(to), scale, rows, columns, x.dtype)


def cast_gradient(dy: Tensor) -> Cast:
    """A gradient (.., columns) as a matrix in 8 bit."""
    return cast(dy, BACKWARD)


def narrow_matrix_product(left: Cast, right: Cast) -> Tensor:
    """Left right^T, both of which lie along what is summed over: (m, k) and (n, k) -> (m, n)."""
    with _without_reference_loops(left.values.device):
        y = torch._scaled_mm(left.values, right.values.t(), left.scale, right.scale, out_dtype=left.wide)
    return y[: left.rows, : right.rows]


@contextmanager
def _without_reference_loops(device: torch.device) -> Iterator[None]:
    """On a CPU, keep oneDNN away, which has reference loops alone for two factors of E4M3.

    PyTorch then multiplies the same numbers in fp32, 500 times as fast (256 x 256 x 256: 1 ms instead of 560).
    """
    enabled = device.type == "cpu" and torch._C._get_mkldnn_enabled()
    if enabled:
        torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        if enabled:
            torch._C._set_mkldnn_enabled(True)


def narrow_linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """(.., in) and (out, in) -> (.., out)."""
    y = narrow_matrix_product(cast(x), cast(matrix))
    shaped = reshaped(y.contiguous(), (*x.shape[:-1], y.shape[1]))
    return shaped if bias is None else shaped.add_(bias)


def narrow_product(dy: Cast, matrix: Tensor) -> Tensor:
    """The gradient (rows, in) of what was multiplied with `matrix` (out, in), of the result's (rows, out)."""
    return narrow_matrix_product(dy, cast(matrix).turned())


def add_narrow_product(main_grad: Tensor, dy: Cast, x: Tensor) -> None:
    """main_grad += dy^T x, with dy (rows, out) and x (.., in)."""
    main_grad.add_(narrow_matrix_product(dy.turned(), cast(x).turned()))
