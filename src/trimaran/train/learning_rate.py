"""Learning rate: linear warm-up, then cosine decay to the minimum."""

from __future__ import annotations

import math

from trimaran.recipe import TrainSettings


def learning_rate(settings: TrainSettings, step: int) -> float:
    """The rate of `step`, counted from 0. After the decay it stays at the minimum."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    decay_steps = settings.decay_steps or settings.steps
    span = max(1, decay_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    lowest = min(settings.min_learning_rate, settings.learning_rate)
    return lowest + 0.5 * (1 + math.cos(math.pi * progress)) * (settings.learning_rate - lowest)
