"""Normalisations over the hidden dimension, repeated on every TP rank."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from trimaran.nouns.model import Model
from trimaran.train.model.weight import DeclaredModule, Weight, WeightSpec


class LayerNorm(DeclaredModule):
    """Layer normalisation (Ba et al., arXiv 1607.06450)."""

    weight: Weight
    bias: Weight

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.epsilon = model.norm_epsilon
        self.declare("weight", WeightSpec((model.hidden,), init="ones"))
        self.declare("bias", WeightSpec((model.hidden,), init="zeros"))

    def forward(self, x: Tensor) -> Tensor:
        """(.., h) -> (.., h)."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class RmsNorm(DeclaredModule):
    """Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467): without a mean and a bias."""

    weight: Weight

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.epsilon = model.norm_epsilon
        self.declare("weight", WeightSpec((model.hidden,), init="ones"))

    def forward(self, x: Tensor) -> Tensor:
        """(.., h) -> (.., h)."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


def make_norm(model: Model) -> LayerNorm | RmsNorm:
    """The normalisation that the model names."""
    return LayerNorm(model) if model.norm == "layernorm" else RmsNorm(model)
