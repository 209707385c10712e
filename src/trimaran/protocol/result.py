"""The result of a run: what rank 0 writes down when all steps are made."""

from __future__ import annotations

import itertools
import math

from pydantic import BaseModel, Field


class RunResult(BaseModel):
    """`result.json`: seconds, losses (nats a token) and gradient norms by step, memory by rank in GiB.

    `unknown_steps` were made before a resumption whose earlier log is lost. What is not finite is null.
    """

    status: str = "ok"
    steps: int = Field(gt=0)
    unknown_steps: int = Field(default=0, ge=0)
    sec_per_it: tuple[float, ...] = Field(min_length=1)
    losses: tuple[float | None, ...]
    grad_norms: tuple[float | None, ...] = ()
    validations: tuple[dict[str, float | None], ...] = Field(default=(), description="step, loss and perplexity each")
    skipped: int = Field(default=0, description="steps whose gradient was too large for fp16")
    mem_gib_per_rank: tuple[float, ...] = Field(min_length=1)
    startup_s: dict[str, float] = Field(default_factory=dict, description="seconds by phase of the start-up")
    parameters: int = 0

    @property
    def finite_losses(self) -> tuple[float, ...]:
        """Losses up to the first that is no number (null, NaN or infinite in the file)."""
        finite = itertools.takewhile(lambda loss: loss is not None and math.isfinite(loss), self.losses)
        return tuple(loss for loss in finite if loss is not None)
