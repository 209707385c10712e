"""The MLP of a layer, cut over TP by its inner dimension: two matrices around a GELU, or three and a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimaran.nouns.model import Model
from trimaran.train.comm.group import Group
from trimaran.train.model.autograd import apply
from trimaran.train.model.tensor_parallel import ColumnLinear, RowLinear
from trimaran.train.model.weight import INIT_STD, residual_std


class Mlp(nn.Module):
    """Two matrices around a GELU."""

    def __init__(self, model: Model, tp_group: Group) -> None:
        super().__init__()
        self.approximate = "tanh" if model.activation == "gelu_tanh" else "none"
        self.up = ColumnLinear(model.hidden, (model.ffn_hidden,), tp_group, bias=model.bias, std=INIT_STD)
        self.down = RowLinear(model.ffn_hidden, model.hidden, tp_group, bias=model.bias, std=residual_std(model))

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        y: Tensor = self.down(functional.gelu(self.up(x), approximate=self.approximate))
        return y


class _Gate(torch.autograd.Function):
    """silu(gate) x up. silu(gate) is computed again in the backward, which saves keeping it."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        d_gate = torch.ops.aten.silu_backward(dy * up, gate)
        return torch.cat((d_gate, functional.silu(gate).mul_(dy)), dim=-1)


class SwiGlu(nn.Module):
    """down(silu(gate(x)) x up(x)) (Shazeer, arXiv 2002.05202).

    Gate and up are a single matrix (2, ffn, h): a single product, and a single sum of its input's gradient over TP.
    """

    def __init__(self, model: Model, tp_group: Group) -> None:
        super().__init__()
        out_shape = (2, model.ffn_hidden)
        self.gate_up = ColumnLinear(model.hidden, out_shape, tp_group, cut=1, bias=model.bias, std=INIT_STD)
        self.down = RowLinear(model.ffn_hidden, model.hidden, tp_group, bias=model.bias, std=residual_std(model))

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        y: Tensor = self.down(apply(_Gate, self.gate_up(x)))
        return y


def make_mlp(model: Model, tp_group: Group) -> Mlp | SwiGlu:
    """The MLP that the model names."""
    return Mlp(model, tp_group) if model.mlp == "gelu" else SwiGlu(model, tp_group)
