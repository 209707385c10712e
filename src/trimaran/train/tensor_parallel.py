"""Linear layers, whole or cut over TP ranks (Shoeybi et al., arXiv 1909.08053)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trimaran.train.differentiable import apply
from trimaran.train.mesh import Group
from trimaran.train.weight import Declaring, Weight, WeightSpec

# oneDNN's bf16 product of two transposed-in operands falls from 1000 to 550 GFLOP/s a core when it
# sums over more tokens than these, on the machine where this was written.
BF16_TOKENS = 512


class _SumBackward(torch.autograd.Function):
    """Identity forward, sum over TP backward: in front of a column-cut layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dy = dy.contiguous()
        ctx.group.sum_(dy)
        return dy, None


class _SumForward(torch.autograd.Function):
    """Sum over TP forward, identity backward: behind a row-cut layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        group.sum_(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Linear(torch.autograd.Function):
    """y = x W^T + b, whose weight gradients are added into `main_grad` by the product itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, bias: Weight | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias
        matrix = weight.view(-1, x.shape[-1])
        return functional.linear(x, matrix, None if bias is None else bias.view(-1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        weight, bias, width = ctx.weight, ctx.bias, x.shape[-1]

        def add_gradients() -> None:
            rows = dy.reshape(-1, dy.shape[-1])
            add_product(weight.main_grad.view(-1, width), rows, x.reshape(-1, width))
            if bias is not None:
                bias.main_grad.view(-1).add_(rows.sum(0))

        weight.accumulate(add_gradients)
        return dy @ weight.view(-1, width), None, None


def add_product(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad += dy^T x, with dy (tokens, out) and x (tokens, in)."""
    if main_grad.dtype != x.dtype:
        main_grad.add_(dy.t() @ x)
        return
    step = BF16_TOKENS if x.dtype == torch.bfloat16 and not x.is_cuda else len(x)
    for begin in range(0, len(x), step):
        main_grad.addmm_(dy[begin : begin + step].t(), x[begin : begin + step])


def sum_backward(x: Tensor, group: Group) -> Tensor:
    """`x`, whose gradient will be summed over the group."""
    return x if group.size == 1 else apply(_SumBackward, x, group)


def sum_forward(x: Tensor, group: Group) -> Tensor:
    """`x` summed over the group, in place."""
    return x if group.size == 1 else apply(_SumForward, x, group)


class ColumnLinear(Declaring):
    """Output features cut over TP: every rank sees all of x (.., in) and returns its own (.., out / TP).

    `out_shape` may have several dimensions, of which `cut` is the one divided among the ranks.
    """

    weight: Weight
    bias: Weight | None

    def __init__(
        self, in_features: int, out_shape: tuple[int, ...], group: Group, *, cut: int = 0, bias: bool, std: float
    ) -> None:
        super().__init__()
        self.group = group
        self.declare("weight", WeightSpec((*out_shape, in_features), shard_dim=cut, std=std), group.size)
        if bias:
            self.declare("bias", WeightSpec(out_shape, shard_dim=cut, init="zeros"), group.size)
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """(.., in) -> (.., out / TP)."""
        return apply(_Linear, sum_backward(x, self.group), self.weight, self.bias)


class RowLinear(Declaring):
    """Input features cut over TP: ranks multiply their own (.., in / TP) and sum the products."""

    weight: Weight
    bias: Weight | None

    def __init__(self, in_features: int, out_features: int, group: Group, *, bias: bool, std: float) -> None:
        super().__init__()
        self.group = group
        self.declare("weight", WeightSpec((out_features, in_features), shard_dim=1, std=std), group.size)
        if bias:
            self.declare("bias", WeightSpec((out_features,), init="zeros"))
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """(.., in / TP) -> (.., out); the bias is added once, after the sum."""
        if self.group.size == 1:
            return apply(_Linear, x, self.weight, self.bias)
        y = sum_forward(apply(_Linear, x, self.weight, None), self.group)
        return y if self.bias is None else y + self.bias
