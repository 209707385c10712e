"""What attention is beside its sizes: low-rank vectors behind it, and rotary angles that reach a longer context."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, model_validator

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


class RotaryScaling(Noun):
    """By wavelengths, as Llama 3.1 has it (arXiv 2407.21783)."""

    factor: float = Field(ge=1)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_positions: int = Field(gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Llama 4 Scout has them equal: nothing is blended
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor:g} is below low_freq_factor {self.low_freq_factor:g}: "
                f"wavelengths between the two are blended, so raise it or lower the other"
            )
        return self


class RotaryYarn(Noun):
    """YaRN (Peng et al., arXiv 2309.00071): by how often features turn within the original context.

    Those that turn more than `beta_fast` times are kept, those that turn less than `beta_slow` times stretched by
    `factor`, those between blended. Cosines and sines are multiplied by `attention_factor`.
    """

    factor: float = Field(ge=1)
    original_max_positions: int = Field(gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    attention_factor: float = Field(default=1.0, gt=0, le=1000)
    mscale_all_dim: float = Field(
        default=0.0, ge=0, le=1000, description="scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2"
    )
    truncate: bool = Field(default=True, description="between whole features")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast {self.beta_fast:g} is below beta_slow {self.beta_slow:g}: what turns between the two is "
                f"blended"
            )
        return self

    @property
    def score_factor(self) -> float:
        """What attention's scores are multiplied by beside their usual scale."""
        return magnitude(self.factor, self.mscale_all_dim) ** 2


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """By how much cosines and sines grow with the context: 0.1 mscale ln(factor) + 1 (YaRN, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0
