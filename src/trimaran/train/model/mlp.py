"""The MLP of a layer, cut over TP by its inner dimension: two matrices around a GELU, or three and a gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimaran.nouns.model import Model
from trimaran.train.comm.group import Group
from trimaran.train.model.autograd import apply
from trimaran.train.model.tensor_parallel import ColumnLinear, RowLinear
from trimaran.train.model.weight import INIT_STD, residual_std


def approximation(model: Model) -> str:
    """How the model's GELU is computed, in PyTorch's words."""
    return "tanh" if model.activation == "gelu_tanh" else "none"


class Mlp(nn.Module):
    """Two matrices around a GELU."""

    def __init__(self, model: Model, tp_group: Group, width: int) -> None:
        super().__init__()
        self.approximate = approximation(model)
        self.up = ColumnLinear(model.hidden, (width,), tp_group, bias=model.bias, std=INIT_STD)
        self.down = RowLinear(width, model.hidden, tp_group, bias=model.bias, std=residual_std(model))

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        y: Tensor = self.down(functional.gelu(self.up(x), approximate=self.approximate))
        return y


@dataclass(frozen=True)
class Activation:
    """A function of a gate, and its backward: (gradient, input, grad_input=where it is written to)."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[..., Tensor]

    def gated_backward(self, dy: Tensor, gate_up: Tensor, activated: Tensor) -> Tensor:
        """Gradient (.., 2 width) of gate and up side by side, of that of act(gate) x up; `activated` is act(gate)."""
        gate, up = gate_up.chunk(2, dim=-1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        torch.mul(activated, dy, out=d_up)
        self.backward(dy * up, gate, grad_input=d_gate)
        return d_gate_up


SILU = Activation(functional.silu, torch.ops.aten.silu_backward)
GELUS = {
    approximate: Activation(
        partial(functional.gelu, approximate=approximate),
        partial(torch.ops.aten.gelu_backward, approximate=approximate),
    )
    for approximate in ("none", "tanh")
}


def gate_activation(model: Model) -> Activation:
    """The function of the model's gates: SiLU (SwiGLU) or GELU (GEGLU)."""
    return SILU if model.mlp == "swiglu" else GELUS[approximation(model)]


class _Gate(torch.autograd.Function):
    """act(gate) x up. act(gate) is computed again in the backward, which saves keeping it."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Activation) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return activation.forward(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, _ = gate_up.chunk(2, dim=-1)
        return ctx.activation.gated_backward(dy, gate_up, ctx.activation.forward(gate)), None


class GatedMlp(nn.Module):
    """down(act(gate(x)) x up(x)), act being SiLU (SwiGLU) or GELU (GEGLU; Shazeer, arXiv 2002.05202).

    Gate and up are a single matrix (2, ffn, h): a single product, and a single sum of its input's gradient over TP.
    """

    def __init__(self, model: Model, tp_group: Group, width: int) -> None:
        super().__init__()
        self.activation = gate_activation(model)
        out_shape = (2, width)
        self.gate_up = ColumnLinear(model.hidden, out_shape, tp_group, cut=1, bias=model.bias, std=INIT_STD)
        self.down = RowLinear(width, model.hidden, tp_group, bias=model.bias, std=residual_std(model))

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        y: Tensor = self.down(apply(_Gate, self.gate_up(x), self.activation))
        return y


def make_mlp(model: Model, tp_group: Group, width: int) -> Mlp | GatedMlp:
    """The MLP that the model names, of an inner `width`."""
    return Mlp(model, tp_group, width) if model.mlp == "gelu" else GatedMlp(model, tp_group, width)
