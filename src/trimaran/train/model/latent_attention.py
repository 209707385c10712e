"""Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), cut over TP by heads, and over CP by tokens.

Every TP rank makes the low-rank vectors of all heads, of its slice of the sequence under sequence parallelism, and its
own heads of them, as Megatron-Core does (megatron/core/transformer/multi_latent_attention.py, MLASelfAttention).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn

from trimaran.nouns.model import Model
from trimaran.train.comm.group import Group
from trimaran.train.model.attention_core import AttentionCore
from trimaran.train.model.context_attention import heads_for_tokens, tokens_for_heads
from trimaran.train.model.norm import RmsNorm
from trimaran.train.model.positions import Positions
from trimaran.train.model.recompute import made_again_and_used, made_and_used, recomputed
from trimaran.train.model.tensor_parallel import ColumnLinear, RowLinear, UncutLinear, sum_backward
from trimaran.train.model.weight import INIT_STD, residual_std

# Of the norms of low-rank vectors, whatever the model's other norms have: transformers 5.18, models/deepseek_v3/
# modeling_deepseek_v3.py, DeepseekV3Attention, gives them none and so their class's own, and so does the code that
# DeepSeek-V2 and V3 were published with.
NORM_EPSILON = 1e-6


class LatentAttention(nn.Module):
    """Causal self-attention whose queries, keys and values are made from low-rank vectors.

    A head's queries and keys are features without positions, then those that are turned; the latter of keys are one
    vector for all heads, whose gradient is the sum of all heads'. `window` as in `AttentionCore`. Of the modules to
    `recompute` `core_attn` is attention itself, and `mla_up_proj` what makes queries, keys and values of the low-rank
    vectors, so that these alone are kept.
    """

    def __init__(
        self, model: Model, tp_group: Group, positions: Positions, *, window: int, recompute: Collection[str]
    ) -> None:
        super().__init__()
        latent = model.latent_attention
        assert latent is not None, "the model has latent attention"
        self.group, self.positions = tp_group, positions
        self.recompute_core = "core_attn" in recompute
        self.projected_up = made_again_and_used if "mla_up_proj" in recompute else made_and_used
        self.core = AttentionCore(model, positions, window=window)
        self.heads = model.heads // tp_group.size
        self.ranks = [latent.query_rank, latent.kv_rank, latent.rotary_dim]
        self.query_parts = [latent.plain_dim, latent.rotary_dim]
        self.kv_parts = [latent.plain_dim, latent.value_dim]
        # one matrix makes the vectors behind queries, those behind keys and values, and what is turned of keys
        self.down = UncutLinear(model.hidden, sum(self.ranks), std=INIT_STD)
        self.query_norm = RmsNorm(latent.query_rank, NORM_EPSILON) if latent.query_rank else None
        self.kv_norm = RmsNorm(latent.kv_rank, NORM_EPSILON)
        queries, keys_values = (model.heads, latent.head_dim), (model.heads, latent.plain_dim + latent.value_dim)
        self.queries = ColumnLinear(latent.query_rank or model.hidden, queries, tp_group, bias=False, std=INIT_STD)
        self.keys_values = ColumnLinear(latent.kv_rank, keys_values, tp_group, bias=False, std=INIT_STD)
        self.projection = RowLinear(model.context_hidden, model.hidden, tp_group, bias=False, std=residual_std(model))

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """(b, s, h) -> (b, s, h), with `documents` as in `Attention.forward`."""
        behind_queries, behind_keys, turned = torch.split(self.down(x), self.ranks, dim=-1)
        latent_queries = x if self.query_norm is None else self.query_norm(behind_queries)
        core = partial(self.attend, documents=documents)
        use = partial(recomputed, core) if self.recompute_core else core
        latents = latent_queries, self.kv_norm(behind_keys), turned
        y: Tensor = self.projection(self.projected_up(self._heads_of, use, *latents))
        return y

    def _heads_of(self, latent_queries: Tensor, latent_keys: Tensor, turned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (b, heads, s, ..) of the low-rank vectors and of what is turned of keys, (b, s, ..).

        All three are copies, so that what they are made of can go.
        """
        queries, keys_values = self.queries(latent_queries), self.keys_values(latent_keys)
        turned = sum_backward(turned, self.group)
        b, s, _ = turned.shape
        q_plain, q_turned = torch.split(queries.view(b, s, self.heads, -1).transpose(1, 2), self.query_parts, dim=-1)
        k_plain, v = torch.split(keys_values.view(b, s, self.heads, -1).transpose(1, 2), self.kv_parts, dim=-1)
        q_turned, k_turned = self.positions.rotate(q_turned, turned.unsqueeze(1))
        q = torch.cat((q_plain, q_turned), dim=-1)
        k = torch.cat((k_plain, k_turned.expand(-1, self.heads, -1, -1)), dim=-1)
        return q, k, v.contiguous()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Attention of this rank's heads: (b, heads, s, ..) -> (b, s, heads x width of values)."""
        sequence, (b, _, s, _) = self.positions.sequence, q.shape
        if sequence.deals_heads:
            widths = [x.shape[-1] for x in (q, k, v)]
            dealt = heads_for_tokens(torch.cat((q, k, v), dim=-1).transpose(1, 2), sequence.group)
            q, k, v = torch.split(dealt.transpose(1, 2), widths, dim=-1)
        y = self.core.attend(q, k, v, documents).transpose(1, 2)
        if sequence.deals_heads:
            y = tokens_for_heads(y, sequence.group)
        return y.reshape(b, s, -1)
