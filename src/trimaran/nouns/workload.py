"""Workload: what is to be trained - a model, a sequence length, a batch and for how long."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, model_validator

from trimaran.nouns.model import Model
from trimaran.nouns.noun import Noun
from trimaran.nouns.stack import Optimizer


class RampUp(Noun):
    """Batch-size ramp-up as Megatron states it: start, increment, samples over which it grows."""

    start: int = Field(gt=0)
    increment: int = Field(gt=0)
    samples: int = Field(gt=0)

    def steps(self, global_batch: int) -> tuple[int, ...]:
        """Every global batch on the way, the last one being `global_batch`."""
        steps = list(range(self.start, global_batch, self.increment))
        return (*steps, global_batch)

    def batch_at(self, consumed_samples: int, global_batch: int) -> int:
        """The global batch once `consumed_samples` were seen (Megatron-LM's rule)."""
        if consumed_samples >= self.samples:
            return global_batch
        increments = max(1, (global_batch - self.start) // self.increment)
        per_increment = self.samples / increments
        grown = self.start + self.increment * math.floor(consumed_samples / per_increment)
        return min(grown, global_batch)


class Workload(Noun):
    """Model, sequence length (tokens), global batch (sequences a step), optimizer, and extent."""

    model: Model
    seq_len: int = Field(gt=0, le=100_000_000)
    global_batch: int = Field(gt=0, le=1_000_000_000)
    optimizer: Optimizer = "adam"
    tokens: int | None = Field(default=None, gt=0)
    ramp_up: RampUp | None = None
    expert_imbalance: float = Field(
        default=1.0, ge=1, le=1e6, description="tokens that the busiest rank's experts are sent, over the mean"
    )
    capacity_factor: float | None = Field(
        default=None, gt=0, le=1e6, description="tokens an expert takes at most, of its even share; None: all"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model.positions == "learned" and self.seq_len > self.model.max_positions:
            raise ValueError(
                f"seq_len {self.seq_len} exceeds max_positions {self.model.max_positions} of the model: "
                f"shorten seq_len or raise max_positions"
            )
        ramp = self.ramp_up
        if ramp and (ramp.start > self.global_batch or (self.global_batch - ramp.start) % ramp.increment):
            raise ValueError(
                f"ramp_up from {ramp.start} by {ramp.increment} does not reach global_batch "
                f"{self.global_batch}: global_batch - start must be a multiple of increment"
            )
        samples = math.inf if self.tokens is None else self.tokens // self.seq_len
        if ramp and ramp.start < self.global_batch and ramp.samples > samples:
            raise ValueError(
                f"ramp_up grows over {ramp.samples} samples, but tokens {self.tokens} end after {samples} of seq_len "
                f"{self.seq_len}: state fewer samples, or more tokens"
            )
        return self

    def batch_at(self, consumed_samples: int) -> int:
        """The global batch of the step before which `consumed_samples` were seen, which a ramp-up changes."""
        ramp = self.ramp_up
        return self.global_batch if ramp is None else ramp.batch_at(consumed_samples, self.global_batch)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one iteration consumes at the full global batch."""
        return self.global_batch * self.seq_len

    @property
    def expert_load(self) -> float:
        """Tokens that the busiest rank's experts take, over the mean."""
        return min(self.expert_imbalance, self.capacity_factor or self.expert_imbalance)

    @property
    def iterations(self) -> int | None:
        """Iterations to see all tokens at the full global batch, or None where no extent is stated."""
        return None if self.tokens is None else -(-self.tokens // self.tokens_per_step)
