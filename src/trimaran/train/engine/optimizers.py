"""AdamW and SGD on the flat buffers, with clipping and loss scale folded into the step."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from trimaran.nouns.workload import Optimizer as OptimizerName
from trimaran.recipe.training import TrainSettings
from trimaran.train.engine.flat_weights import FlatWeights
from trimaran.train.engine.units import Run


class Optimizer(ABC):
    """One fused call per kind of weights: those that decay, and biases and norms.

    `state` holds, by name, one tensor for each span of `FlatWeights.owned`, in their order; `steps` counts the
    updates. Both may be written to, as a checkpoint does.
    """

    def __init__(self, flat: FlatWeights, settings: TrainSettings, state: tuple[str, ...]) -> None:
        self._flat = flat
        self._settings = settings
        self.state: dict[str, tuple[Tensor, ...]] = {name: flat.zeros_like_owned() for name in state}
        self.steps = 0

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: float, loss_scale: float = 1.0) -> None:
        """One update by the gradients, which are `loss_scale` times too large.

        Gradients above `clip_grad` in norm are scaled down to it. `grad_norm` is that of the true ones.
        """
        settings, flat = self._settings, self._flat
        clip = grad_norm / settings.clip_grad if settings.clip_grad else 0.0
        divisor = loss_scale * max(1.0, clip)
        for parts, weight_decay in ((flat.decaying, settings.weight_decay), (flat.constant, 0.0)):
            if parts:
                grads = _cut(flat.grads, parts)
                # the kernel divides the gradients by it, which saves a pass over them
                scale = None if divisor == 1.0 else torch.tensor(divisor, device=grads[0].device)
                state = {name: _cut(held, parts) for name, held in self.state.items()}
                self._update(_cut(flat.master, parts), grads, state, scale, learning_rate, weight_decay)
        self.steps += 1

    @abstractmethod
    def _update(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        state: dict[str, list[Tensor]],
        divisor: Tensor | None,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        """Update weights and state of one kind."""


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    def __init__(self, flat: FlatWeights, settings: TrainSettings) -> None:
        super().__init__(flat, settings, ("exp_avg", "exp_avg_sq"))

    def _update(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        state: dict[str, list[Tensor]],
        divisor: Tensor | None,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        adamw(
            weights,
            grads,
            state["exp_avg"],
            state["exp_avg_sq"],
            [],
            # the kernel wants the count of steps as a tensor per parameter, and adds to it
            [torch.full((), float(self.steps), device=grads[0].device) for _ in grads],
            fused=True,
            grad_scale=divisor,
            amsgrad=False,
            beta1=self._settings.beta1,
            beta2=self._settings.beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self._settings.epsilon,
            maximize=False,
        )


class Sgd(Optimizer):
    """Stochastic gradient descent without momentum, as torch.optim.SGD has it: it keeps no state."""

    def __init__(self, flat: FlatWeights, settings: TrainSettings) -> None:
        super().__init__(flat, settings, ())

    def _update(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        state: dict[str, list[Tensor]],
        divisor: Tensor | None,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        sgd(
            weights,
            grads,
            [None] * len(grads),
            fused=True,
            grad_scale=divisor,
            weight_decay=weight_decay,
            momentum=0.0,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def make_optimizer(name: OptimizerName, flat: FlatWeights, settings: TrainSettings) -> Optimizer:
    """The optimizer that the workload names."""
    return AdamW(flat, settings) if name == "adam" else Sgd(flat, settings)


def _cut(held: tuple[Tensor, ...], parts: tuple[Run, ...]) -> list[Tensor]:
    return [held[part.held][part.within] for part in parts]
