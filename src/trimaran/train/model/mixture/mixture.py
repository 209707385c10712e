"""A mixture of experts in place of a layer's MLP: each token goes to the experts that its router chooses."""

from __future__ import annotations

from torch import Tensor, nn

from trimaran.nouns.model import Model
from trimaran.train.comm.mesh import Mesh
from trimaran.train.model.mixture.dispatch import Dispatch
from trimaran.train.model.mixture.experts import Experts
from trimaran.train.model.mixture.router import Router
from trimaran.train.model.mlp import make_mlp


class Mixture(nn.Module):
    """Router, routed experts, and an MLP that every token goes to where the model has shared experts.

    Under TP the input and the result are a slice of the sequence: each rank sends tokens of its own.
    """

    def __init__(self, model: Model, mesh: Mesh, layer: int) -> None:
        super().__init__()
        self._mesh, self._count = mesh, model.experts
        self.router = Router(model, layer)
        self.experts = Experts(model, mesh)
        shared = model.shared_experts * model.moe_ffn_hidden
        self.shared = make_mlp(model, mesh.tp, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        routing = self.router(x)
        dispatch = Dispatch(routing.experts, self._count, self._mesh.ep, self._mesh.etp)
        rows = dispatch.to_experts(x.reshape(-1, x.shape[-1]))
        given = self.experts(rows, dispatch.weights_to_experts(routing.weights), dispatch.counts)
        y = dispatch.from_experts(given).view_as(x)
        return y if self.shared is None else y + self.shared(x)
