"""AdamW on the flat buffers, with clipping folded into the step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trimaran.recipe import TrainSettings
from trimaran.train.flat import FlatWeights
from trimaran.train.units import Run


class AdamW:
    """Fused AdamW (Loshchilov and Hutter, arXiv 1711.05101), one call per kind of weights.

    `state` holds, by name, one tensor for each span of `FlatWeights.owned`, in their order; `steps` counts the
    updates. Both may be written to, as a checkpoint does.
    """

    def __init__(self, flat: FlatWeights, settings: TrainSettings) -> None:
        self._flat = flat
        self._settings = settings
        self.state: dict[str, tuple[Tensor, ...]] = {
            "exp_avg": flat.zeros_like_owned(),
            "exp_avg_sq": flat.zeros_like_owned(),
        }
        self.steps = 0

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: float) -> None:
        """One update. Gradients above `clip_grad` in norm are scaled down to it, then cleared."""
        settings, flat = self._settings, self._flat
        kinds = ((flat.decaying, settings.weight_decay), (flat.constant, 0.0))
        for parts, weight_decay in kinds:
            if not parts:
                continue
            grads = _cut(flat.grads, parts)
            # fused AdamW wants the count of steps as a tensor per parameter, and adds to it
            steps = [torch.full((), float(self.steps), device=grads[0].device) for _ in parts]
            adamw(
                _cut(flat.master, parts),
                grads,
                _cut(self.state["exp_avg"], parts),
                _cut(self.state["exp_avg_sq"], parts),
                [],
                steps,
                fused=True,
                grad_scale=self._clip_divisor(grad_norm, grads[0].device),
                amsgrad=False,
                beta1=settings.beta1,
                beta2=settings.beta2,
                lr=learning_rate,
                weight_decay=weight_decay,
                eps=settings.epsilon,
                maximize=False,
            )
        self.steps += 1

    def _clip_divisor(self, grad_norm: float, device: torch.device) -> Tensor | None:
        """What the kernel divides the gradients by, which saves clipping its own pass over them."""
        limit = self._settings.clip_grad
        if not limit or grad_norm <= limit:
            return None
        return torch.tensor(grad_norm / limit, device=device)


def _cut(held: tuple[Tensor, ...], parts: tuple[Run, ...]) -> list[Tensor]:
    return [held[part.held][part.within] for part in parts]
