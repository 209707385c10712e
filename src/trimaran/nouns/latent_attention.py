"""LatentAttention: queries, keys and values made from low-rank vectors."""

from __future__ import annotations

from pydantic import Field

from trimaran.nouns.noun import Noun


class LatentAttention(Noun):
    """Ranks and widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A head's queries and keys are `plain_dim` features without positions beside `rotary_dim` that are turned, which keys
    of all heads share; its values are `value_dim` wide.
    """

    query_rank: int = Field(ge=0, le=1_000_000, description="0: queries are made from the hidden state itself")
    kv_rank: int = Field(gt=0, le=1_000_000)
    plain_dim: int = Field(gt=0, le=1_000_000)
    rotary_dim: int = Field(gt=0, le=1_000_000)
    value_dim: int = Field(gt=0, le=1_000_000)

    @property
    def head_dim(self) -> int:
        """Features of a head's queries and keys."""
        return self.plain_dim + self.rotary_dim

    def parameters(self, hidden: int, heads: int) -> int:
        """Parameters of one layer's attention: projections down and up with a norm between, and the one back."""
        queries = heads * self.head_dim
        to_queries = (hidden + 1 + queries) * self.query_rank if self.query_rank else hidden * queries
        down = hidden * (self.kv_rank + self.rotary_dim)
        up = self.kv_rank * (1 + heads * (self.plain_dim + self.value_dim))
        return to_queries + down + up + heads * self.value_dim * hidden
