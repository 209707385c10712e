"""Sums over rows of 16 bit in wider numbers, for which a CPU copies the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from trimaran.train.comm.device_kind import on_gpu

# Elements that are copied at once: 4 MiB of fp32, which stay in a CPU's cache. A copy of all of them goes through its
# memory, and takes new pages.
ELEMENTS = 2**20


def pieces(rows: Tensor, wide: torch.dtype) -> tuple[Tensor, ...]:
    """(rows, columns), so many rows at once as are to be summed in `wide`; all of them where nothing is copied."""
    if rows.dtype == wide or on_gpu(rows.device):
        return (rows,)
    return torch.split(rows, max(1, ELEMENTS // max(1, rows.shape[1])))


def sums_of_rows(x: Tensor, wide: torch.dtype) -> Tensor:
    """(rows, columns) -> (rows,) in `wide`."""
    return torch.cat([rows.sum(1, dtype=wide) for rows in pieces(x, wide)])
