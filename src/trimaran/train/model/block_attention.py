"""Causal attention as products of whole blocks of queries: with a window, with capped scores, or on a CPU in bf16 and
with values that are not as wide as keys.

The flash kernel of `scaled_dot_product_attention` knows neither windows nor caps. A block meets the keys of its
queries' windows alone, so that what lies outside of a window costs nothing. On a CPU in bf16 that kernel works through
small tiles, whose products run at half the rate of large products: it takes twice the time (docs/training-speed.md).
Scores exist for a single block of queries at a time, and are computed again in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trimaran.train.comm.device_kind import on_gpu
from trimaran.train.model.autograd import apply
from trimaran.train.model.product import goes_through_fp32

# Queries whose scores exist at a time. Fewer make smaller products, more compute more scores that the mask discards.
BLOCK = 128

# A GPU needs more, to keep all its processors busy.
GPU_BLOCK = 512


@dataclass(frozen=True)
class Scores:
    """How scores come of queries and keys: q k^T times `scale`, within `cap` by tanh, of `window` keys; 0: no such."""

    scale: float
    cap: float = 0.0
    window: int = 0


def _block(device: torch.device) -> int:
    return GPU_BLOCK if on_gpu(device) else BLOCK


@lru_cache(maxsize=8)
def _bias(length: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(block, length) of 0, and -inf where one of the last `block` tokens does not attend to another."""
    block = min(_block(device), length)
    allowed = torch.ones(block, length, dtype=torch.bool, device=device).tril_(length - block)
    if window:
        allowed.triu_(length - block - window + 1)
    return torch.zeros(block, length, dtype=dtype, device=device).masked_fill_(~allowed, -torch.inf)


def _blocks(length: int, window: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Queries of each block, and the keys that some of them attend to."""
    block = _block(device)
    for begin in range(0, length, block):
        end = min(begin + block, length)
        yield slice(begin, end), slice(max(0, begin - window + 1) if window else 0, end)


class _Heads:
    """Queries (b, heads, s, d) with the keys (b, kv heads, s, d) that groups of them share, and their scores."""

    def __init__(self, q: Tensor, k: Tensor, mask: Tensor | None, scores: Scores) -> None:
        self.shape, self.scores, self.mask = q.shape, scores, mask
        self.groups, self.shared = k.shape[0] * k.shape[1], q.shape[1] // k.shape[1]
        self.keys = k.flatten(0, 1)
        self.bias = _bias(q.shape[2], scores.window, q.dtype, q.device)

    def rows(self, x: Tensor, rows: slice) -> Tensor:
        """(b, heads, s, d) -> those of a block as (b x kv heads, queries that share a key x n, d)."""
        return x[:, :, rows].reshape(self.groups, -1, x.shape[-1])

    def put_product(self, x: Tensor, rows: slice, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
        """Write such a block of left x right times `scale` to (b, heads, s, d)."""
        block = x.view(self.groups, self.shared, *x.shape[2:])[:, :, rows]
        if self.shared == 1:
            torch.baddbmm(block[:, 0], left, right, beta=0, alpha=scale, out=block[:, 0])
        else:
            block.copy_(torch.bmm(left, right).mul_(scale).view(block.shape))

    def probabilities(self, q: Tensor, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """Of a block's rows over its keys; and the tanh of what its scores were, where they are capped."""
        how, bias = self.scores, self._bias_of(rows, keys)
        k = self.keys[:, keys].transpose(1, 2)
        if not how.cap:
            return torch.baddbmm(bias, q, k, alpha=how.scale).softmax(2), None
        tanh = torch.bmm(q, k).mul_(how.scale / how.cap).tanh_()
        return torch.add(bias, tanh, alpha=how.cap).softmax(2), tanh

    def _bias_of(self, rows: slice, keys: slice) -> Tensor:
        """What is added to the scores of a block, which broadcasts to them."""
        n, m = rows.stop - rows.start, keys.stop - keys.start
        bias = self.bias[self.bias.shape[0] - n :, self.bias.shape[1] - m :]
        if self.mask is not None:
            mask = self.mask[:, :, rows, keys]
            bias = torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias
            return bias.expand(*self.shape[:2], n, m).reshape(self.groups, -1, m)
        return bias.repeat(self.shared, 1) if self.shared > 1 else bias


def _multiplied(*factors: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in what they are multiplied in: fp32 where their own precision has no products."""
    return tuple(factor.float() for factor in factors) if goes_through_fp32(factors[0]) else factors


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.scores = scores
        dtype, (q, k, v) = q.dtype, _multiplied(q, k, v)
        heads = _Heads(q, k, mask, scores)
        v = v.flatten(0, 1)
        y = q.new_empty(*q.shape[:3], v.shape[-1])
        for rows, keys in _blocks(q.shape[2], scores.window, q.device):
            heads.put_product(y, rows, heads.probabilities(heads.rows(q, rows), rows, keys)[0], v[:, keys])
        return y.to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *saved, mask = ctx.saved_tensors
        dtype, (q, k, v, dy) = dy.dtype, _multiplied(*saved, dy)
        heads, scale = _Heads(q, k, mask, ctx.scores), ctx.scores.scale
        values = v.flatten(0, 1)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = torch.zeros_like(heads.keys), torch.zeros_like(values)
        for rows, keys in _blocks(q.shape[2], ctx.scores.window, q.device):
            queries, d_rows = heads.rows(q, rows), heads.rows(dy, rows)
            p, tanh = heads.probabilities(queries, rows, keys)
            ds = torch._softmax_backward_data(d_rows @ values[:, keys].transpose(1, 2), p, 2, p.dtype)
            if tanh is not None:
                ds.mul_(1.0 - tanh.square_())
            dv[:, keys].baddbmm_(p.transpose(1, 2), d_rows)
            dk[:, keys].baddbmm_(ds.transpose(1, 2), queries, alpha=scale)
            heads.put_product(dq, rows, ds, heads.keys[:, keys], scale)
            del p, tanh, ds  # or they would stay beside the next block's
        return dq.to(dtype), dk.view(k.shape).to(dtype), dv.view(v.shape).to(dtype), None, None


def is_faster_in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether `causal_attention` is faster for these queries, keys and values than the flash kernel.

    That of a CPU takes values as wide as keys alone, so that others would have to be padded.
    """
    if on_gpu(q.device):
        return False
    return q.shape[-1] != v.shape[-1] or (mask is None and q.dtype == torch.bfloat16 and q.shape == k.shape)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores, mask: Tensor | None = None) -> Tensor:
    """Causal attention of queries (b, heads, s, d), keys (b, kv heads, s, d) and values (b, kv heads, s, any width).

    `mask`, which broadcasts to (b, heads, s, s), says which scores count, or is added to them.
    """
    return apply(_Causal, q, k, v, mask, scores)
