"""AdamW on the flat buffers, with clipping folded into the step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trimaran.recipe import TrainSettings
from trimaran.train.flat import FlatWeights


class AdamW:
    """Fused AdamW (Loshchilov and Hutter, arXiv 1711.05101), one call per run of like weights."""

    def __init__(self, flat: FlatWeights, settings: TrainSettings) -> None:
        self._flat = flat
        self._settings = settings
        self.exp_avg = torch.zeros_like(flat.master)
        self.exp_avg_sq = torch.zeros_like(flat.master)
        # fused AdamW keeps the count of steps as a tensor per parameter
        self._steps = [torch.zeros((), device=flat.master.device) for _ in flat.segments]

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: float) -> None:
        """One update. Gradients above `clip_grad` in norm are scaled down to it, then cleared."""
        settings, flat = self._settings, self._flat
        for segment, steps in zip(flat.segments, self._steps, strict=True):
            span = slice(segment.begin, segment.end)
            adamw(
                [flat.master[span]],
                [flat.grads[span]],
                [self.exp_avg[span]],
                [self.exp_avg_sq[span]],
                [],
                [steps],
                fused=True,
                grad_scale=self._clip_divisor(grad_norm),
                amsgrad=False,
                beta1=settings.beta1,
                beta2=settings.beta2,
                lr=learning_rate,
                weight_decay=settings.weight_decay if segment.decays else 0.0,
                eps=settings.epsilon,
                maximize=False,
            )
        if flat.master is not flat.weights:
            flat.weights.copy_(flat.master)

    def _clip_divisor(self, grad_norm: float) -> Tensor | None:
        """What the kernel divides the gradients by, which saves clipping its own pass over them."""
        limit = self._settings.clip_grad
        if not limit or grad_norm <= limit:
            return None
        return torch.tensor(grad_norm / limit, device=self._flat.master.device)
