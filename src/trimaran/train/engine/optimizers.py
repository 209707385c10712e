"""AdamW and SGD on the flat weights, with clipping and loss scale folded into the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from trimaran.nouns.stack import Optimizer as OptimizerName
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.engine.flat_weights import FlatWeights


@dataclass(frozen=True)
class ParameterGroup:
    """Weights that are updated alike, with their gradients and optimizer state; gradients are divided by `divisor`."""

    weights: list[Tensor]
    grads: list[Tensor]
    state: dict[str, list[Tensor]]
    divisor: Tensor | None
    weight_decay: float


class Optimizer(ABC):
    """One fused call for the weights that decay, and one for biases and norms.

    `state` holds, by name, a tensor for each span of `FlatWeights.owned`, in their order; `steps` counts the
    updates. Both may be written to, as a checkpoint does.
    """

    def __init__(self, flat: FlatWeights, settings: TrainSettings, state: tuple[str, ...]) -> None:
        self._flat = flat
        self._settings = settings
        self.state: dict[str, tuple[Tensor, ...]] = {name: flat.zeros_like_owned() for name in state}
        self.steps = 0

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: float, loss_scale: float = 1.0) -> None:
        """Update the weights by gradients that are `loss_scale` times too large.

        Gradients above `clip_grad` in norm are scaled down to it. `grad_norm` is without the loss scale.
        """
        settings, flat = self._settings, self._flat
        clip = grad_norm / settings.clip_grad if settings.clip_grad else 0.0
        divisor = loss_scale * max(1.0, clip)
        for parts, weight_decay in ((flat.decaying, settings.weight_decay), (flat.not_decaying, 0.0)):
            if parts:
                grads = [part.of(flat.grads) for part in parts]
                # the kernel divides the gradients by it, which saves a pass over them
                scale = None if divisor == 1.0 else torch.tensor(divisor, device=grads[0].device)
                state = {name: [part.of(tensors) for part in parts] for name, tensors in self.state.items()}
                weights = [part.of(flat.master) for part in parts]
                self._update(ParameterGroup(weights, grads, state, scale, weight_decay), learning_rate)
        self.steps += 1

    @abstractmethod
    def _update(self, group: ParameterGroup, learning_rate: float) -> None:
        """Update the group's weights and state."""


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    def __init__(self, flat: FlatWeights, settings: TrainSettings) -> None:
        super().__init__(flat, settings, ("exp_avg", "exp_avg_sq"))

    def _update(self, group: ParameterGroup, learning_rate: float) -> None:
        adamw(
            group.weights,
            group.grads,
            group.state["exp_avg"],
            group.state["exp_avg_sq"],
            [],
            # the kernel takes the count of steps as a tensor per parameter, and adds to it
            [torch.full((), float(self.steps), device=grads.device) for grads in group.grads],
            fused=True,
            grad_scale=group.divisor,
            amsgrad=False,
            beta1=self._settings.beta1,
            beta2=self._settings.beta2,
            lr=learning_rate,
            weight_decay=group.weight_decay,
            eps=self._settings.epsilon,
            maximize=False,
        )


class Sgd(Optimizer):
    """Stochastic gradient descent without momentum, as torch.optim.SGD computes it: it keeps no state."""

    def __init__(self, flat: FlatWeights, settings: TrainSettings) -> None:
        super().__init__(flat, settings, ())

    def _update(self, group: ParameterGroup, learning_rate: float) -> None:
        sgd(
            group.weights,
            group.grads,
            [None] * len(group.grads),
            fused=True,
            grad_scale=group.divisor,
            weight_decay=group.weight_decay,
            momentum=0.0,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def make_optimizer(name: OptimizerName, flat: FlatWeights, settings: TrainSettings) -> Optimizer:
    """The optimizer that the workload names."""
    return AdamW(flat, settings) if name == "adam" else Sgd(flat, settings)
