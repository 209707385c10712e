"""Causal self-attention, cut over TP by heads, and over CP by tokens."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn

from trimaran.nouns.model import Model
from trimaran.train.comm.group import Group
from trimaran.train.model.attention_core import AttentionCore
from trimaran.train.model.context_attention import heads_for_tokens, tokens_for_heads
from trimaran.train.model.latent_attention import LatentAttention
from trimaran.train.model.norm import make_query_key_norm
from trimaran.train.model.positions import Positions
from trimaran.train.model.recompute import recomputed
from trimaran.train.model.tensor_parallel import ColumnLinear, RowLinear
from trimaran.train.model.weight import INIT_STD, residual_std


class Attention(nn.Module):
    """Causal self-attention; each TP rank computes a part of the key-value heads with their queries.

    `window` as in `AttentionCore`. Where `core_attn` is among the modules to `recompute` what lies between the
    projections is computed again in the backward (arXiv 2205.05198).
    """

    def __init__(
        self, model: Model, tp_group: Group, positions: Positions, *, window: int, recompute: Collection[str]
    ) -> None:
        super().__init__()
        self.recompute = "core_attn" in recompute
        self.positions = positions
        self.core = AttentionCore(model, positions, window=window)
        self.query_key_norm = make_query_key_norm(model, tp_group)
        self.queries_per_kv = model.heads // model.kv_heads
        self.kv_heads = model.kv_heads // tp_group.size
        self.head_dim = model.head_dim
        # per key-value head: its queries, the key, the value - so that a cut by heads is a single slice
        out_shape = (model.kv_heads, self.queries_per_kv + 2, model.head_dim)
        self.qkv = ColumnLinear(model.hidden, out_shape, tp_group, bias=model.biased_attention != "none", std=INIT_STD)
        biased = model.biased_attention == "all"
        self.projection = RowLinear(
            model.attention_hidden, model.hidden, tp_group, bias=biased, std=residual_std(model)
        )

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """(b, s, h) -> (b, s, h). `documents` (b, s): tokens attend within their document alone.

        Under CP s are this rank's tokens, but `documents` have those of all ranks.
        """
        core = partial(self.attend, documents=documents)
        qkv = self.qkv(x)
        y: Tensor = self.projection(recomputed(core, qkv) if self.recompute else core(qkv))
        return y

    def attend(self, qkv: Tensor, documents: Tensor | None) -> Tensor:
        """Attention of this rank's heads: their q, k and v as (b, s, ..) -> (b, s, heads x head_dim)."""
        b, s, _ = qkv.shape
        sequence = self.positions.sequence
        qkv, parts = qkv.view(b, s, self.kv_heads, self.queries_per_kv + 2, self.head_dim), [self.queries_per_kv, 1, 1]
        q, k, v = torch.split(qkv, parts, dim=3)
        if self.query_key_norm is not None:
            q, k = self.query_key_norm(q, k)
        if sequence.deals_heads:
            normed = qkv if self.query_key_norm is None else torch.cat((q, k, v), dim=3)
            q, k, v = torch.split(heads_for_tokens(normed, sequence.group), parts, dim=3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        q, k = self.positions.rotate(q, k)
        y = self.core.attend(q, k, v, documents).transpose(1, 2)
        if sequence.deals_heads:
            y = tokens_for_heads(y, sequence.group)
        return y.reshape(b, s, -1)


def make_attention(
    model: Model, tp_group: Group, positions: Positions, *, window: int, recompute: Collection[str]
) -> Attention | LatentAttention:
    """The attention that the model names, of a layer with a `window`."""
    kind = Attention if model.latent_attention is None else LatentAttention
    return kind(model, tp_group, positions, window=window, recompute=recompute)
