"""Learning rate: linear warm-up, then cosine decay to the minimum, by steps, samples or tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimaran.recipe.train_settings import TrainSettings


@dataclass(frozen=True)
class Position:
    """Where a training stands before a step: steps made, samples consumed, and the samples of this step."""

    steps: int
    samples: int
    batch: int
    seq_len: int


def learning_rate(settings: TrainSettings, at: Position) -> float:
    """The rate of the step at position `at`. After the decay it stays at the minimum.

    The schedule runs over samples or tokens where the settings state its spans in them, so that it does not
    change with a ramp-up of the batch.
    """
    done, now, warmup, decay = at.steps, 1, settings.warmup_steps, settings.decay_steps or settings.steps
    if settings.decay_samples is not None:
        done, now, warmup, decay = at.samples, at.batch, settings.warmup_samples, settings.decay_samples
    if settings.decay_tokens is not None:
        done, now = at.samples * at.seq_len, at.batch * at.seq_len
        warmup, decay = settings.warmup_tokens, settings.decay_tokens
    if done < warmup:
        return settings.learning_rate * min(1.0, (done + now) / warmup)
    progress = min(1.0, (done - warmup) / max(1, decay - warmup))
    lowest = min(settings.min_learning_rate, settings.learning_rate)
    return lowest + 0.5 * (1 + math.cos(math.pi * progress)) * (settings.learning_rate - lowest)
