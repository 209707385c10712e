"""Linear layers, whole or cut over TP ranks (Shoeybi et al., arXiv 1909.08053).

Between them all TP ranks compute the same, or a slice of the sequence each under sequence parallelism
(Korthikanti et al., arXiv 2205.05198): what is summed over TP is then left as a slice on each rank, and slices are
gathered before the next product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimaran.train.comm.group import Group
from trimaran.train.model.autograd import apply
from trimaran.train.model.narrow import add_narrow_product, cast_gradient, narrow_linear, narrow_product
from trimaran.train.model.product import add_product, linear, product
from trimaran.train.model.weight import DeclaredModule, Weight, WeightSpec


class _SumBackward(torch.autograd.Function):
    """Identity forward, sum over TP backward: in front of a column-cut layer (f of Shoeybi et al.)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dy = dy.contiguous()
        ctx.group.all_reduce(dy)
        return dy, None


class _SumForward(torch.autograd.Function):
    """Sum over TP forward, identity backward: behind a row-cut layer (g of Shoeybi et al.)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        group.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _SumBoth(torch.autograd.Function):
    """Sum over TP forward and backward: of what every rank has a part of, and goes on with in an own way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        group.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dy = dy.contiguous()
        ctx.group.all_reduce(dy)
        return dy, None


class _GatherForward(torch.autograd.Function):
    """Every rank's slice of the sequence gathered; its gradient summed and sliced (g of Korthikanti et al.)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return summed_slice(dy, ctx.group), None


class _ScatterForward(torch.autograd.Function):
    """This rank's slice of the sum over TP; the gradients of all slices gathered (g-bar of Korthikanti et al.)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return summed_slice(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return gathered(dy, ctx.group), None


def gathered(x: Tensor, group: Group) -> Tensor:
    """(b, s / TP, ..) slices of the sequence -> (b, s, ..)."""
    whole = x.new_empty(group.size, *x.shape)
    group.all_gather_into(whole, x.contiguous())
    return whole.transpose(0, 1).reshape(x.shape[0], -1, *x.shape[2:])


def summed_slice(x: Tensor, group: Group) -> Tensor:
    """(b, s, ..) on every rank -> this rank's slice (b, s / TP, ..) of their sum."""
    slices = x.reshape(x.shape[0], group.size, -1, *x.shape[2:]).transpose(0, 1).contiguous()
    local_slice = torch.empty_like(slices[0])
    group.reduce_scatter(local_slice, slices)
    return local_slice


class _Linear(torch.autograd.Function):
    """y = x W^T + b, whose weight gradients are added into `main_grad` by the product itself.

    With a group x is a slice of the sequence, gathered for the product. The slice alone is kept, and gathered again
    for the weight gradients (Korthikanti et al., arXiv 2205.05198, section 4.2.2).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, bias: Weight | None, group: Group | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.group = weight, bias, group
        matrix = weight.view(-1, x.shape[-1])
        x = x if group is None else gathered(x, group)
        ctx.shape = x.shape
        return (narrow_linear if weight.eight_bit else linear)(x, matrix, None if bias is None else bias.view(-1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach()  # what is put off would keep the graph behind it, and the gradient of the stage's input
        weight, bias, group, width = ctx.weight, ctx.bias, ctx.group, x.shape[-1]
        narrow_dy = cast_gradient(dy) if weight.eight_bit else None

        def add_gradients() -> None:
            rows, columns = dy.reshape(-1, dy.shape[-1]), x if group is None else gathered(x, group)
            main_grad = weight.main_grad.view(-1, width)
            if narrow_dy is None:
                add_product(main_grad, rows, columns.reshape(-1, width))
            else:
                add_narrow_product(main_grad, narrow_dy, columns)
            if bias is not None:
                bias.main_grad.view(-1).add_(rows.sum(0))

        weight.accumulate(add_gradients)
        matrix = weight.view(-1, width)
        dx = (
            product(dy, matrix)
            if narrow_dy is None
            else narrow_product(narrow_dy, matrix).reshape(*dy.shape[:-1], width)
        )
        return dx if group is None else summed_slice(dx, group), None, None, None


def sum_backward(x: Tensor, group: Group) -> Tensor:
    """`x`, whose gradient will be summed over the group. Slices of the sequence are gathered."""
    if group.size == 1:
        return x
    return apply(_GatherForward if group.slices_sequence else _SumBackward, x, group)


def sum_forward(x: Tensor, group: Group) -> Tensor:
    """`x` summed over the group, in place; under sequence parallelism this rank's slice of that sum."""
    if group.size == 1:
        return x
    return apply(_ScatterForward if group.slices_sequence else _SumForward, x, group)


def sum_both(x: Tensor, group: Group) -> Tensor:
    """`x` summed over the group, in place, and so is its gradient: each rank uses the sum in an own way."""
    return x if group.size == 1 else apply(_SumBoth, x, group)


def sequence_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part of a tensor with the whole sequence in `dim`: all of it without sequence parallelism."""
    return x.chunk(group.size, dim)[group.index] if group.slices_sequence else x


class ColumnLinear(DeclaredModule):
    """Output features cut over TP: every rank reads all of x (.., in) and returns a part (.., out / TP).

    `out_shape` may have several dimensions, of which `cut` is divided among the ranks.
    """

    weight: Weight
    bias: Weight | None

    def __init__(
        self, in_features: int, out_shape: tuple[int, ...], group: Group, *, cut: int = 0, bias: bool, std: float
    ) -> None:
        super().__init__()
        self.group = group
        self.declare("weight", WeightSpec((*out_shape, in_features), shard_dim=cut, std=std), group.size)
        self.declare("bias", WeightSpec(out_shape, shard_dim=cut, init="zeros") if bias else None, group.size)

    def forward(self, x: Tensor) -> Tensor:
        """(.., in) -> (.., out / TP); from a slice of the sequence to all of it under sequence parallelism."""
        if self.group.slices_sequence:
            return apply(_Linear, x, self.weight, self.bias, self.group)
        return apply(_Linear, sum_backward(x, self.group), self.weight, self.bias, None)


class UncutLinear(DeclaredModule):
    """A matrix that every TP rank holds whole: of the same tokens as the others, or of its slice of the sequence."""

    weight: Weight

    def __init__(self, in_features: int, out_features: int, *, std: float) -> None:
        super().__init__()
        self.declare("weight", WeightSpec((out_features, in_features), std=std))

    def forward(self, x: Tensor) -> Tensor:
        """(.., in) -> (.., out) of the same tokens."""
        return apply(_Linear, x, self.weight, None, None)


class RowLinear(DeclaredModule):
    """Input features cut over TP: each rank multiplies its part (.., in / TP), and the products are summed."""

    weight: Weight
    bias: Weight | None

    def __init__(self, in_features: int, out_features: int, group: Group, *, bias: bool, std: float) -> None:
        super().__init__()
        self.group = group
        self.declare("weight", WeightSpec((out_features, in_features), shard_dim=1, std=std), group.size)
        self.declare("bias", WeightSpec((out_features,), init="zeros") if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """(.., in / TP) -> (.., out); the bias is added once, after the sum.

        Under sequence parallelism the result is this rank's slice of the sequence.
        """
        if self.group.size == 1:
            return apply(_Linear, x, self.weight, self.bias, None)
        y = sum_forward(apply(_Linear, x, self.weight, None, None), self.group)
        return y if self.bias is None else y + self.bias
