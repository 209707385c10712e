"""Experts' rows in whole blocks, where products of a new shape cost more than the rows that fill a block.

oneDNN makes bf16 products on CPUs by code that it generates for each shape and keeps: an expert is given another
number of rows in every micro-batch, so that a step of 4 layers with 8 experts generated 270 pieces of code. In blocks
shapes come again, which `docs/training-speed.md` says the worth of. fp16 goes through fp32 (`product.py`), and experts'
products in fp32 are MKL's, which generates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from trimaran.train.comm.device_kind import on_gpu
from trimaran.train.model.autograd import apply

# Of an expert's 512 rows 3% more are computed with 32; 16 are as fast and generate twice as many pieces of code.
ROWS = 32


def wants_blocks(x: Tensor) -> bool:
    """Whether products of `x` are bf16 ones on a CPU."""
    return x.dtype == torch.bfloat16 and not on_gpu(x.device)


def in_blocks(counts: Sequence[int]) -> list[int]:
    """The rows of each expert in whole blocks."""
    return [-(-rows // ROWS) * ROWS for rows in counts]


def _filled(rows: Tensor, counts: Sequence[int]) -> Tensor:
    blocks = in_blocks(counts)
    y = rows.new_empty(sum(blocks), *rows.shape[1:])
    for given, room in zip(torch.split(rows, list(counts)), torch.split(y, blocks), strict=True):
        room[: len(given)] = given
        room[len(given) :] = 0
    return y


def _taken(blocks: Tensor, counts: Sequence[int]) -> Tensor:
    begins = [begin for begin, _ in pairwise(accumulate(in_blocks(counts), initial=0))]
    return torch.cat([blocks[begin : begin + rows] for begin, rows in zip(begins, counts, strict=True)])


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.counts = counts
        return _filled(rows, counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _taken(dy, ctx.counts), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.counts = counts
        return _taken(blocks, counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _filled(dy, ctx.counts), None


def fill(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """(rows, ..) in the order of their experts -> (rows in whole blocks, ..), zero where none of them is.

    `counts` are the rows of each expert, all of `rows` together; RuntimeError where they are not.
    """
    return apply(_Fill, rows, counts)


def take(blocks: Tensor, counts: Sequence[int]) -> Tensor:
    """The inverse: (rows in whole blocks, ..) -> (rows, ..)."""
    return apply(_Take, blocks, counts)
