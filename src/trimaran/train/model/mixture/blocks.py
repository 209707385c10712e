"""Experts' rows in whole blocks, where products of a new shape cost more than the rows that fill a block.

oneDNN makes products on CPUs by code that it generates for each shape and keeps: an expert is given another number of
rows in every micro-batch, so that a step of 4 layers with 8 experts generated 270 pieces of code. In blocks shapes come
again, which `docs/training-speed.md` says the worth of. Which products are oneDNN's, `product.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

# Of an expert's 512 rows 3% more are computed with 32; 16 are as fast and generate twice as many pieces of code.
ROWS = 32


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
