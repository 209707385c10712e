"""Normalisations: of the hidden dimension, repeated on every TP rank, and of each rank's queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimaran.nouns.model import Model
from trimaran.train.comm.group import Group
from trimaran.train.model.tensor_parallel import sum_both
from trimaran.train.model.weight import DeclaredModule, Weight, WeightSpec


class LayerNorm(DeclaredModule):
    """Layer normalisation (Ba et al., arXiv 1607.06450) of the last dimension.

    With `summed_over_tp` each TP rank norms features of its own with the same weights.
    """

    weight: Weight
    bias: Weight

    def __init__(self, width: int, epsilon: float, *, summed_over_tp: bool = False) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.declare("weight", WeightSpec((width,), init="ones", summed_over_tp=summed_over_tp))
        self.declare("bias", WeightSpec((width,), init="zeros", summed_over_tp=summed_over_tp))

    def forward(self, x: Tensor) -> Tensor:
        """(.., width) -> (.., width)."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class RmsNorm(DeclaredModule):
    """Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467): without a mean and a bias.

    With `summed_over_tp` each TP rank norms features of its own with the same weights.
    """

    weight: Weight

    def __init__(self, width: int, epsilon: float, *, summed_over_tp: bool = False) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.declare("weight", WeightSpec((width,), init="ones", summed_over_tp=summed_over_tp))

    def forward(self, x: Tensor) -> Tensor:
        """(.., width) -> (.., width)."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


def make_norm(model: Model) -> LayerNorm | RmsNorm:
    """The normalisation of the hidden state that the model names."""
    kind = LayerNorm if model.norm == "layernorm" else RmsNorm
    return kind(model.hidden, model.norm_epsilon)


class HeadNorm(nn.Module):
    """Every head's queries and keys are normed alone, with weights that all heads share (Qwen3)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        kind = LayerNorm if model.norm == "layernorm" else RmsNorm
        self.queries = kind(model.head_dim, model.norm_epsilon, summed_over_tp=True)
        self.keys = kind(model.head_dim, model.norm_epsilon, summed_over_tp=True)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(.., head_dim) of queries and of keys, both of the same shape again."""
        return self.queries(q), self.keys(k)


class AllHeadsNorm(DeclaredModule):
    """The queries of all heads are RMS-normed as one, and so are the keys (OLMo2).

    TP ranks hold the weights of their heads, and sum the squares of all.
    """

    queries: Weight
    keys: Weight

    def __init__(self, model: Model, group: Group) -> None:
        super().__init__()
        self.group, self.epsilon = group, model.norm_epsilon
        self.widths = model.attention_hidden, model.kv_hidden
        in_groups = (model.kv_heads, model.heads // model.kv_heads, model.head_dim)
        self.declare("queries", WeightSpec(in_groups, shard_dim=0, init="ones"), group.size)
        self.declare("keys", WeightSpec((model.kv_heads, 1, model.head_dim), shard_dim=0, init="ones"), group.size)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(b, s, kv heads / TP, queries or 1, head_dim) of queries and of keys, both of the same shape again."""
        wide = q.float(), k.float()
        of_queries, of_keys = sum_both(torch.stack([x.square().sum((2, 3, 4)) for x in wide]), self.group)
        query_width, key_width = self.widths
        queries = self._scaled(wide[0], of_queries / query_width) * self.queries
        keys = self._scaled(wide[1], of_keys / key_width) * self.keys
        return queries.to(q.dtype), keys.to(k.dtype)

    def _scaled(self, x: Tensor, mean_square: Tensor) -> Tensor:
        return x * (mean_square + self.epsilon).rsqrt()[..., None, None, None]


def make_query_key_norm(model: Model, group: Group) -> HeadNorm | AllHeadsNorm | None:
    """The normalisation of queries and keys that the model names, if any."""
    if model.qk_norm == "none":
        return None
    return HeadNorm(model) if model.qk_norm == "head" else AllHeadsNorm(model, group)
