"""Causal attention of tokens whose keys lie on several ranks (context parallelism).

Keys and values go round a ring (Liu et al., arXiv 2310.01889) or are gathered (Llama 3, arXiv 2407.21783, section
3.3.2). Either way each rank attends to those of one rank after the other and adds the results up as it goes. With an
early and a late chunk on every rank (`SequenceShare`) it needs of an earlier rank's keys the early half, and of a later
rank's all, for its late half alone: half of all pairs on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimaran.train.comm.exchange import done
from trimaran.train.comm.group import Group
from trimaran.train.comm.sequence_share import SequenceShare
from trimaran.train.model.autograd import apply
from trimaran.train.model.flash_kernels import attend, attend_backward
from trimaran.train.model.positions import BlockMask


class _Block(NamedTuple):
    """Queries of this rank that attend to keys of another, places on their ranks; only one's own need a causal mask."""

    rows: slice
    columns: slice
    causal: bool


def _block(index: int, source: int, tokens: int) -> _Block:
    everything, half = slice(0, tokens), tokens // 2
    if source == index:
        return _Block(everything, everything, causal=True)
    if source < index:
        return _Block(everything, slice(0, half), causal=False)
    return _Block(slice(half, tokens), everything, causal=False)


@dataclass(frozen=True)
class _Packing:
    """How keys and values of these shapes, or their gradients, lie in one tensor that is sent."""

    keys: torch.Size
    values: torch.Size

    def parts(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as views of the tensor."""
        keys, values = torch.split(packed, [self.keys.numel(), self.values.numel()])
        return keys.view(self.keys), values.view(self.values)

    def packed(self, keys: Tensor, values: Tensor) -> Tensor:
        """A tensor of both."""
        packed = keys.new_empty(self.keys.numel() + self.values.numel())
        for part, of in zip(self.parts(packed), (keys, values), strict=True):
            part.copy_(of)
        return packed


def _passed_round(group: Group, keys_values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Every rank and its keys and values, this one's first. They are passed on while the caller works with them."""
    for step in range(group.size):
        arriving, finish = group.begin_shift(keys_values) if step < group.size - 1 else (keys_values, done)
        yield (group.index - step) % group.size, keys_values
        finish()
        keys_values = arriving


def _gathered(group: Group, keys_values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The same, all of them gathered at once."""
    whole = keys_values.new_empty(group.size, *keys_values.shape)
    group.all_gather_into(whole, keys_values)
    for step in range(group.size):
        source = (group.index - step) % group.size
        yield source, whole[source]


class _RingGradients:
    """Gradients of keys and values that follow these round the ring, each rank adding its part, and come home."""

    def __init__(self, group: Group, packing: _Packing, like: Tensor) -> None:
        self._group, self._packing, self._arriving, self._finish = group, packing, like, done

    def add(self, source: int, columns: slice, dk: Tensor, dv: Tensor) -> None:
        """Add this rank's part to the gradients of rank `source`, in the order of the ring."""
        if source == self._group.index:
            so_far = self._packing.packed(dk, dv)
        else:
            so_far = self.home()
            for part, added in zip(self._packing.parts(so_far), (dk, dv), strict=True):
                part[:, :, columns].add_(added)
        self._arriving, self._finish = self._group.begin_shift(so_far)

    def home(self) -> Tensor:
        """What the last rank has sent here: after all have added their parts, this rank's own gradients."""
        self._finish()
        return self._arriving


class _GatheredGradients:
    """Gradients of all ranks' keys and values, which are summed at last, each rank getting its own."""

    def __init__(self, group: Group, packing: _Packing, like: Tensor) -> None:
        self._group, self._packing, self._whole = group, packing, like.new_zeros(group.size, *like.shape)

    def add(self, source: int, columns: slice, dk: Tensor, dv: Tensor) -> None:
        """Put down this rank's part of the gradients of rank `source`."""
        for part, found in zip(self._packing.parts(self._whole[source]), (dk, dv), strict=True):
            part[:, :, columns] = found

    def home(self) -> Tensor:
        """This rank's own gradients."""
        summed = torch.empty_like(self._whole[0])
        self._group.reduce_scatter(summed, self._whole)
        return summed


class _ContextAttention(torch.autograd.Function):
    """Keeps this rank's queries, keys and values; those of others come again in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceShare, mask: BlockMask) -> Tensor:
        group, tokens = sequence.group, q.shape[2]
        # copies, so that what they are views of can go; in the order of tokens, which the result will have too
        packing = _Packing(k.shape, v.shape)
        q, keys_values = q.transpose(1, 2).contiguous().transpose(1, 2), packing.packed(k, v)
        brought = (_passed_round if sequence.kind == "ring" else _gathered)(group, keys_values)
        total, total_sums = Tensor(), Tensor()
        for source, there in brought:
            k_there, v_there = packing.parts(there)
            rows, columns, causal = _block(group.index, source, tokens)
            block_mask = mask(source, rows, columns)
            keys, values = k_there[:, :, columns], v_there[:, :, columns]
            y, sums = attend(q[:, :, rows], keys, values, causal=causal and block_mask is None, mask=block_mask)
            if source == group.index:  # comes first
                total, total_sums = y.float(), sums
            else:
                before = total_sums[:, :, rows]
                after = torch.logaddexp(before, sums)
                total[:, :, rows].lerp_(y.float(), (sums - after).exp_().unsqueeze(-1))
                total_sums[:, :, rows] = after
        total = total.to(q.dtype)
        ctx.save_for_backward(q, keys_values, total, total_sums)
        ctx.sequence, ctx.mask, ctx.packing = sequence, mask, packing
        return total

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, keys_values, y, sums = ctx.saved_tensors
        sequence: SequenceShare = ctx.sequence
        group, tokens = sequence.group, q.shape[2]
        is_ring = sequence.kind == "ring"
        brought = (_passed_round if is_ring else _gathered)(group, keys_values)
        packing: _Packing = ctx.packing
        gradients = (_RingGradients if is_ring else _GatheredGradients)(group, packing, keys_values)
        dq = Tensor()
        for source, there in brought:
            k_there, v_there = packing.parts(there)
            rows, columns, causal = _block(group.index, source, tokens)
            block_mask = ctx.mask(source, rows, columns)
            keys, values = k_there[:, :, columns], v_there[:, :, columns]
            d_rows, dk, dv = attend_backward(
                dy[:, :, rows], q[:, :, rows], keys, values, y[:, :, rows], sums[:, :, rows].contiguous(),
                causal=causal and block_mask is None, mask=block_mask,
            )  # fmt: skip
            if source == group.index:
                dq = d_rows.float()
            else:
                dq[:, :, rows].add_(d_rows)
            gradients.add(source, columns, dk, dv)
        dk, dv = packing.parts(gradients.home())
        return dq.to(q.dtype), dk, dv, None, None


def context_attention(q: Tensor, k: Tensor, v: Tensor, sequence: SequenceShare, mask: BlockMask) -> Tensor:
    """Causal attention of this rank's tokens to those of all ranks before them.

    Queries are (b, heads, s / CP, d), keys and values (b, kv_heads, s / CP, ..) -> (b, heads, s / CP, width of values).
    A `mask` that is not None forbids keys after their query by itself.
    """
    return apply(_ContextAttention, q, k, v, sequence, mask)


class _Dealt(torch.autograd.Function):
    """Parts of heads in place of parts of tokens, and back in the backward; or the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _heads_for_tokens(x, group) if to_heads else _tokens_for_heads(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        turned = _tokens_for_heads if ctx.to_heads else _heads_for_tokens
        return turned(dy, ctx.group), None, None


def _heads_for_tokens(x: Tensor, group: Group) -> Tensor:
    """(b, s / CP, heads, ..) -> (b, s, heads / CP, ..)."""
    parts = x.reshape(*x.shape[:2], group.size, -1, *x.shape[3:]).movedim(2, 0).contiguous()
    return group.all_to_all(parts).movedim(0, 1).flatten(1, 2)


def _tokens_for_heads(x: Tensor, group: Group) -> Tensor:
    """(b, s, heads / CP, ..) -> (b, s / CP, heads, ..)."""
    parts = x.reshape(x.shape[0], group.size, -1, *x.shape[2:]).movedim(1, 0).contiguous()
    return group.all_to_all(parts).movedim(0, 2).flatten(2, 3)


def heads_for_tokens(x: Tensor, group: Group) -> Tensor:
    """All heads of this rank's tokens -> this rank's heads of all tokens (DeepSpeed Ulysses, arXiv 2309.14509).

    (b, s / CP, heads, ..) -> (b, s, heads / CP, ..).
    """
    return apply(_Dealt, x, group, True)


def tokens_for_heads(x: Tensor, group: Group) -> Tensor:
    """This rank's heads of all tokens -> all heads of this rank's tokens: (b, s, heads / CP, ..) -> (b, s / CP, ..)."""
    return apply(_Dealt, x, group, False)
