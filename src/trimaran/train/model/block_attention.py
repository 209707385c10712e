"""Causal attention in bf16 on a CPU, as products of whole blocks of queries.

The flash kernel of `scaled_dot_product_attention` works through small tiles, whose products run at half the rate of
large products there: it takes twice the time (docs/training-speed.md).
Scores exist for a single block of queries at a time, and are computed again in the backward.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trimaran.train.model.autograd import apply

# Queries whose scores exist at a time. Fewer make smaller products, more compute more scores that the mask discards.
BLOCK = 128


@lru_cache(maxsize=8)
def _bias(length: int, dtype: torch.dtype) -> Tensor:
    """(block, length) of 0, and -inf where the last `block` keys come after the last `block` queries."""
    block = min(BLOCK, length)
    return torch.full((block, length), -torch.inf).triu_(length - block + 1).to(dtype)


def _blocks(length: int) -> list[tuple[slice, slice]]:
    """Queries of each block, and the keys up to its end."""
    return [(slice(begin, min(begin + BLOCK, length)), slice(0, begin + BLOCK)) for begin in range(0, length, BLOCK)]


def _probabilities(q: Tensor, k: Tensor, scale: float, bias: Tensor) -> Tensor:
    """(heads, n, d) queries over (heads, m, d) keys, the last n of which are those of the queries themselves."""
    mask = bias[bias.shape[0] - q.shape[1] :, bias.shape[1] - k.shape[1] :]
    return torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale).softmax(2)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        shape, scale = q.shape, q.shape[-1] ** -0.5
        bias = _bias(shape[2], q.dtype)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        y = torch.empty_like(q)
        for rows, keys in _blocks(shape[2]):
            torch.bmm(_probabilities(q[:, rows], k[:, keys], scale, bias), v[:, keys], out=y[:, rows])
        return y.view(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = dy.shape
        scale = shape[-1] ** -0.5
        q, k, v, dy = (x.flatten(0, 1) for x in (*ctx.saved_tensors, dy))
        bias = _bias(shape[2], q.dtype)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, keys in _blocks(shape[2]):
            p = _probabilities(q[:, rows], k[:, keys], scale, bias)
            dp = dy[:, rows] @ v[:, keys].transpose(1, 2)
            ds = torch._softmax_backward_data(dp, p, 2, p.dtype)
            dv[:, keys].baddbmm_(p.transpose(1, 2), dy[:, rows])
            dk[:, keys].baddbmm_(ds.transpose(1, 2), q[:, rows], alpha=scale)
            torch.baddbmm(dq[:, rows], ds, k[:, keys], beta=0, alpha=scale, out=dq[:, rows])
        return dq.view(shape), dk.view(shape), dv.view(shape)


def is_faster_in_blocks(q: Tensor, k: Tensor) -> bool:
    """Whether `causal_attention` is faster for these queries and keys than the flash kernel."""
    return not q.is_cuda and q.dtype == torch.bfloat16 and q.shape == k.shape


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of queries, keys and values, all (b, heads, s, d) with as many key-value as query heads."""
    return apply(_Causal, q, k, v)
