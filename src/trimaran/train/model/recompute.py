"""Recompute: forget a layer's activations and compute them again in the backward (arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimaran.train.model.autograd import apply, backward


class _Recomputed(torch.autograd.Function):
    """Keeps the input alone. The layers here draw no random numbers, so nothing else need be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        backward(y, dy)
        return x.grad, None


def recomputed(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """layer(x), whose inner activations are computed again when they are needed."""
    return apply(_Recomputed, x, layer)
