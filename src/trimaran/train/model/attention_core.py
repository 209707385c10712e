"""Causal attention of given queries, keys and values, by the kernel that suits them."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from trimaran.nouns.model import Model
from trimaran.train.model.block_attention import Scores, causal_attention, is_faster_in_blocks
from trimaran.train.model.context_attention import context_attention
from trimaran.train.model.positions import Positions


class AttentionCore:
    """Scores, softmax and context: of whole sequences, or of tokens whose keys lie on several ranks.

    A token attends to so many tokens before it, itself among them, as `window` says, to all where it is 0.
    """

    def __init__(self, model: Model, positions: Positions, *, window: int) -> None:
        self.positions = positions
        factor = 1.0 if model.rotary_yarn is None else model.rotary_yarn.score_factor
        scale = (model.query_scale or model.head_dim) ** -0.5 * factor
        self.scores = Scores(scale, cap=model.attention_softcap, window=window)
        # what queries are multiplied by where a kernel divides scores by the root of head_dim
        usual = model.query_scale is None and factor == 1.0
        self.stretch = 1.0 if usual else scale * model.head_dim**0.5

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Queries (b, heads, s, d), keys and values (b, kv heads, s, ..) -> (b, heads, s, width of values).

        `documents` as in `Attention.forward`.
        """
        sequence = self.positions.sequence
        if not sequence.shares_attention:
            return self._attend_whole(q, k, v, documents)
        if self.stretch != 1.0:
            q = q * self.stretch
        mask = self.positions.block_mask(q, documents, self.scores.window)
        return context_attention(q, k, v, sequence, mask)

    def _attend_whole(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Attention of whole sequences."""
        mask = self.positions.mask(q, documents)
        wants_blocks = self.scores.cap > 0 or 0 < self.scores.window < q.shape[2]
        if wants_blocks or is_faster_in_blocks(q, k, v, mask):
            return causal_attention(q, k, v, self.scores, mask)
        scale, grouped = self.scores.scale, q.shape[1] > k.shape[1]
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
