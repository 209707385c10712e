"""The experts that a rank holds: MLPs of one shape, each given tokens of its own, in products that are grouped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trimaran.nouns.model import Model
from trimaran.train.comm.mesh import Mesh
from trimaran.train.model.autograd import apply
from trimaran.train.model.mixture.blocks import fill, in_blocks, make_code, pieces_of, take
from trimaran.train.model.mlp import Activation, approximation, gate_activation
from trimaran.train.model.narrow import add_narrow_product, cast_gradient, narrow_linear, narrow_product
from trimaran.train.model.product import add_product, generates_code, product
from trimaran.train.model.recompute import made_again_and_used, made_and_used
from trimaran.train.model.weight import INIT_STD, DeclaredModule, Weight, WeightSpec, residual_std
from trimaran.train.model.wide_sums import sums_of_rows


def spans(counts: Sequence[int], most: int | None = None) -> list[tuple[int, slice]]:
    """Each expert that has rows, and where they are among all rows, which lie in the order of the experts.

    In pieces of `most` rows where that is given.
    """
    bounds, length = pairwise(accumulate(counts, initial=0)), most or max(counts) or 1
    return [
        (expert, slice(piece, min(piece + length, end)))
        for expert, (begin, end) in enumerate(bounds)
        for piece in range(begin, end, length)
    ]


def grouped(x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """(rows, in) in the order of the experts and (experts, out, in) -> (rows, out)."""
    y = x.new_empty(len(x), matrices.shape[1])
    for expert, rows in spans(counts, pieces_of(x)):
        product(x[rows], matrices[expert].t(), out=y[rows])
    return y


def narrow_grouped(x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """The same in 8 bit, each expert's rows and matrix with a scale of their own."""
    y = x.new_empty(len(x), matrices.shape[1])
    for expert, rows in spans(counts):
        y[rows] = narrow_linear(x[rows], matrices[expert])
    return y


def grouped_weight_gradient(grads: Tensor, dy: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    """grads[e] += dy_e^T x_e for each expert e: (experts, out, in), (rows, out) and (rows, in)."""
    for expert, rows in spans(counts, pieces_of(x)):
        add_product(grads[expert], dy[rows], x[rows])


def narrow_grouped_backward(dy: Tensor, x: Tensor, weight: Weight, counts: Sequence[int]) -> Tensor:
    """The gradient (rows, in) of x, of that of the result (rows, out), in 8 bit; weight gradients are accumulated."""
    shape = (len(counts), -1, x.shape[1])
    matrices, dx = weight.view(shape), torch.empty_like(x)
    casts = [(expert, rows, cast_gradient(dy[rows])) for expert, rows in spans(counts)]

    def add_gradients() -> None:
        for expert, rows, narrow_dy in casts:
            add_narrow_product(weight.main_grad.view(shape)[expert], narrow_dy, x[rows])

    weight.accumulate(add_gradients)
    for expert, rows, narrow_dy in casts:
        dx[rows] = narrow_product(narrow_dy, matrices[expert])
    return dx


class _GroupedLinear(torch.autograd.Function):
    """y = x W_e^T of the expert e of each row, whose weight gradients are added into `main_grad` by the products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.counts = weight, counts
        return (narrow_grouped if weight.eight_bit else grouped)(x, weight.view(len(counts), -1, x.shape[1]), counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach()  # what is put off would keep the graph behind it
        weight, counts = ctx.weight, ctx.counts
        if weight.eight_bit:
            return narrow_grouped_backward(dy, x, weight, counts), None, None

        shape = (len(counts), -1, x.shape[1])
        weight.accumulate(lambda: grouped_weight_gradient(weight.main_grad.view(shape), dy, x, counts))
        return grouped(dy, weight.view(shape).transpose(1, 2), counts), None, None


class _WeighedGate(torch.autograd.Function):
    """act(gate) x up x weight of the row. What it multiplies is computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, activation: Activation) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate_up, weights)
        gate, up = gate_up.chunk(2, dim=-1)
        return activation.forward(gate).mul_(up).mul_(weights.unsqueeze(1).to(gate.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate_up, weights = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        activated = ctx.activation.forward(gate)
        d_weights = sums_of_rows((activated * up).mul_(dy), weights.dtype)
        dy = dy * weights.unsqueeze(1).to(dy.dtype)
        return ctx.activation.gated_backward(dy, gate_up, activated), d_weights, None


class _WeighedGelu(torch.autograd.Function):
    """gelu(x) x weight of the row, likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.approximate = approximate
        return functional.gelu(x, approximate=approximate).mul_(weights.unsqueeze(1).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = ctx.saved_tensors
        d_weights = sums_of_rows(functional.gelu(x, approximate=ctx.approximate).mul_(dy), weights.dtype)
        dy = dy * weights.unsqueeze(1).to(dy.dtype)
        return torch.ops.aten.gelu_backward(dy, x, approximate=ctx.approximate), d_weights, None


class Experts(DeclaredModule):
    """This rank's experts of a layer, whole or cut over ETP by their inner width.

    A token's weight multiplies what stands before the last product, so that its gradient needs no more kept than that
    product keeps; with `recompute_activation` that is made again for it.
    """

    up: Weight
    down: Weight

    def __init__(self, model: Model, mesh: Mesh, *, recompute_activation: bool) -> None:
        super().__init__()
        self.activated = made_again_and_used if recompute_activation else made_and_used
        self.gate = gate_activation(model) if model.gated_mlp else None
        self.approximate = approximation(model)
        e, f, h = model.experts, model.moe_ffn_hidden, model.hidden
        # gate and up are a single matrix, as a dense layer's are
        up = (e, model.mlp_matrices - 1, f, h)
        degrees = (mesh.etp.size, mesh.ep.size)
        self.declare("up", WeightSpec(up, shard_dim=2, std=INIT_STD, kind="experts"), *degrees)
        down = WeightSpec((e, h, f), shard_dim=2, std=residual_std(model), kind="experts")
        self.declare("down", down, *degrees)

    def make_code(self) -> None:
        """Have the code of its products generated, once its weights have their places, and memory or not."""
        _, hidden, inner = self.down.shape
        for weight, out_features, in_features in (
            (self.up, self.up.shape[1:-1].numel(), hidden),
            (self.down, hidden, inner),
        ):
            make_code(out_features, in_features, weight.dtype, weight.main_grad.dtype, weight.device)

    def forward(self, x: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
        """(rows, h) in the order of the experts and their weights (rows,) -> (rows, h), a part of the sum over ETP."""
        if not generates_code(x):
            return self._through(x, weights, counts)
        return take(self._through(fill(x, counts), fill(weights, counts), in_blocks(counts)), counts)

    def _through(self, x: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
        def down(activated: Tensor) -> Tensor:
            return apply(_GroupedLinear, activated, self.down, counts)

        return self.activated(self._activate, down, apply(_GroupedLinear, x, self.up, counts), weights)

    def _activate(self, inner: Tensor, weights: Tensor) -> Tensor:
        if self.gate is not None:
            return apply(_WeighedGate, inner, weights, self.gate)
        return apply(_WeighedGelu, inner, weights, self.approximate)
