"""Recompute: forget a layer's activations and compute them again in the backward (arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimaran.train.model.autograd import Backward, apply


class _Recomputed(torch.autograd.Function):
    """Keeps the inputs alone. The layers here draw no random numbers, so nothing else need be kept."""

    @staticmethod
    def forward(ctx: Any, layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*inputs)
        return layer(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            again = Backward(ctx.layer(*inputs))
        again.run(dy)
        return None, *(x.grad for x in inputs)


def recomputed(layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """layer(*inputs), whose inner activations are computed again when they are needed."""
    return apply(_Recomputed, layer, *inputs)
