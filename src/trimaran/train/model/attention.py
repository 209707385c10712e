"""Causal self-attention, cut over TP by heads."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimaran.nouns.model import Model
from trimaran.train.comm.group import Group
from trimaran.train.model.block_attention import causal_attention, is_faster_in_blocks
from trimaran.train.model.positions import Positions
from trimaran.train.model.recompute import recomputed
from trimaran.train.model.tensor_parallel import ColumnLinear, RowLinear
from trimaran.train.model.weight import INIT_STD, residual_std


class Attention(nn.Module):
    """Causal self-attention; each TP rank computes a part of the key-value heads with their queries.

    With `recompute` what lies between the projections is computed again in the backward (arXiv 2205.05198).
    """

    def __init__(self, model: Model, tp_group: Group, positions: Positions, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.positions = positions
        self.queries_per_kv = model.heads // model.kv_heads
        self.kv_heads = model.kv_heads // tp_group.size
        self.head_dim = model.head_dim
        # per key-value head: its queries, the key, the value - so that a cut by heads is a single slice
        out_shape = (model.kv_heads, self.queries_per_kv + 2, model.head_dim)
        self.qkv = ColumnLinear(model.hidden, out_shape, tp_group, bias=model.bias, std=INIT_STD)
        self.projection = RowLinear(
            model.attention_hidden, model.hidden, tp_group, bias=model.bias, std=residual_std(model)
        )

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """(b, s, h) -> (b, s, h). `documents` (b, s): tokens attend within their document alone."""
        core = partial(self.attend, documents=documents)
        qkv = self.qkv(x)
        y: Tensor = self.projection(recomputed(core, qkv) if self.recompute else core(qkv))
        return y

    def attend(self, qkv: Tensor, documents: Tensor | None) -> Tensor:
        """Attention of this rank's heads: their q, k and v as (b, s, ..) -> (b, s, heads x head_dim)."""
        b, s, _ = qkv.shape
        qkv = qkv.view(b, s, self.kv_heads, self.queries_per_kv + 2, self.head_dim)
        q, k, v = torch.split(qkv, [self.queries_per_kv, 1, 1], dim=3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        q, k = self.positions.rotate(q, k)
        mask = self.positions.mask(q, documents)
        if mask is None and is_faster_in_blocks(q, k):
            y = causal_attention(q, k, v)
        else:
            y = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.queries_per_kv > 1
            )
        return y.transpose(1, 2).reshape(b, s, -1)
