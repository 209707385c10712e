"""Experts' rows in whole blocks, where products of a new shape cost more than the rows that fill a block.

oneDNN makes products on CPUs by code that it generates for each shape and keeps: an expert is given another number of
rows in every micro-batch, so that a step of 4 layers with 8 experts generated 270 pieces of code. In blocks shapes come
again, which `docs/training-speed.md` says the worth of. Which products are oneDNN's, `product.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from trimaran.train.model.product import add_product, generates_code, product

# Of an expert's 512 rows 3% more are computed with 32; 16 are as fast and generate twice as many pieces of code.
ROWS = 32
# An expert's rows are multiplied so many at a time, so that shapes are as few however many tokens there are.
MOST_ROWS = 512


def pieces_of(x: Tensor) -> int | None:
    """How many of an expert's rows `x` are multiplied at a time; None: all."""
    return MOST_ROWS if generates_code(x) else None


@cache
def make_code(
    out_features: int, in_features: int, dtype: torch.dtype, of_gradients: torch.dtype, device: torch.device
) -> None:
    """Have the code of all products of experts' matrices of one shape generated, forward and backward.

    It stays for good. Made before a training it lies together; made between activations it keeps the memory around it
    apart, and a training holds the more the longer it runs.
    """
    x, y = (torch.zeros(MOST_ROWS, size, dtype=dtype, device=device) for size in (in_features, out_features))
    if not generates_code(x):
        return
    matrix = torch.zeros(out_features, in_features, dtype=dtype, device=device)
    total = torch.zeros_like(matrix, dtype=of_gradients)
    for rows in range(MOST_ROWS, 0, -ROWS):
        product(x[:rows], matrix.t(), out=y[:rows])
        product(y[:rows], matrix, out=x[:rows])
        add_product(total, y[:rows], x[:rows])


def in_blocks(counts: Sequence[int]) -> list[int]:
    """The rows of each expert in whole blocks."""
    return [-(-rows // ROWS) * ROWS for rows in counts]


def fill(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """(rows, ..) in the order of their experts -> (rows in whole blocks, ..), zero where none of them is.

    `counts` are the rows of each expert, all of `rows` together; RuntimeError where they are not.
    """
    inner = (0, 0) * (rows.dim() - 1)
    of_each = torch.split(rows, list(counts))
    return torch.cat([functional.pad(given, (*inner, 0, -len(given) % ROWS)) for given in of_each])


def take(blocks: Tensor, counts: Sequence[int]) -> Tensor:
    """The inverse: (rows in whole blocks, ..) -> (rows, ..)."""
    of_each = torch.split(blocks, in_blocks(counts))
    return torch.cat([room[:rows] for room, rows in zip(of_each, counts, strict=True)])
