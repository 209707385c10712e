"""A mixture of experts in place of a layer's MLP: each token goes to the experts that its router chooses."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from trimaran.nouns.model import Model
from trimaran.train.comm.mesh import Mesh
from trimaran.train.model.mixture.dispatch import Dispatch
from trimaran.train.model.mixture.experts import Experts
from trimaran.train.model.mixture.router import Router
from trimaran.train.model.mlp import make_mlp
from trimaran.train.model.product import reshaped
from trimaran.train.model.recompute import recomputed


class Mixture(nn.Module):
    """Router, routed experts, and an MLP that every token goes to where the model has shared experts.

    Under TP the input and the result are a slice of the sequence: each rank sends tokens of its own. Of the modules to
    `recompute` it has `moe_act` and `shared_experts`.
    """

    def __init__(self, model: Model, mesh: Mesh, layer: int, *, recompute: Collection[str] = ()) -> None:
        super().__init__()
        self._mesh, self._count = mesh, model.experts
        self.router = Router(model, layer)
        self.experts = Experts(model, mesh, recompute_activation="moe_act" in recompute)
        shared = model.shared_experts * model.moe_ffn_hidden
        self.shared = make_mlp(model, mesh.tp, shared) if shared else None
        self.recompute_shared = "shared_experts" in recompute

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        routing = self.router(x)
        dispatch = Dispatch(routing.experts, self._count, self._mesh.ep, self._mesh.etp)
        rows = dispatch.to_experts(x.reshape(-1, x.shape[-1]))
        given = self.experts(rows, dispatch.weights_to_experts(routing.weights), dispatch.counts)
        y = reshaped(dispatch.from_experts(given), x.shape)
        if self.shared is None:
            return y
        return y.add_(recomputed(self.shared, x) if self.recompute_shared else self.shared(x))
