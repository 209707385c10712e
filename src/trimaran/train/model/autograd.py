"""Autograd with types: applying a function of ours, and a backward from a given gradient."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """`function.apply(*arguments)`, which torch leaves untyped, for a function of one result."""
    return cast(Tensor, function.apply(*arguments))  # type: ignore[no-untyped-call]


class _GradientOf(torch.autograd.Function):
    """A scalar whose value has no meaning, and whose backward passes on the gradient that `given` then holds."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, given: list[Tensor]) -> Tensor:
        ctx.given = given
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.given.pop(), None


class Backward:
    """The backward that is to come from a tensor, which may be freed before: the graph behind it needs no values of it.

    It does what `torch.autograd.backward(y, dy)` does, which imports SymPy to compare the two shapes: 0.3 s and 31 MB
    of every rank.
    """

    def __init__(self, y: Tensor) -> None:
        self._given: list[Tensor] = []
        with torch.enable_grad():
            self._root = apply(_GradientOf, y, self._given)

    def run(self, dy: Tensor | None = None) -> None:
        """Once, from the gradient of the tensor; None stands for the 1 of a scalar."""
        self._given.append(self._root.new_ones(()) if dy is None else dy)
        del dy
        torch.autograd.backward(self._root)
