"""The GPT: pre-norm transformer layers, and the part of them that one pipeline stage holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate

from torch import Tensor, nn
from torch.nn import functional

from trimaran.layout import Layout
from trimaran.model import Model
from trimaran.train.mesh import Group, Mesh
from trimaran.train.recompute import recomputed
from trimaran.train.tensor_parallel import ColumnLinear, RowLinear
from trimaran.train.vocabulary import Embedding, Head
from trimaran.train.weight import Declaring, Weight, WeightSpec

INIT_STD = 0.02
NORM_EPSILON = 1e-5


class LayerNorm(Declaring):
    """Layer normalisation over the hidden dimension, repeated on every TP rank."""

    weight: Weight
    bias: Weight

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.declare("weight", WeightSpec((hidden,), init="ones"))
        self.declare("bias", WeightSpec((hidden,), init="zeros"))

    def forward(self, x: Tensor) -> Tensor:
        """(.., h) -> (.., h)."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, NORM_EPSILON)


class Attention(nn.Module):
    """Causal self-attention; each TP rank computes its own key-value heads with their queries."""

    def __init__(self, model: Model, group: Group) -> None:
        super().__init__()
        self.queries_per_kv = model.heads // model.kv_heads
        self.kv_heads = model.kv_heads // group.size
        self.head_dim = model.head_dim
        # per key-value head: its queries, the key, the value - so that a cut by heads is one slice
        out_shape = (model.kv_heads, self.queries_per_kv + 2, model.head_dim)
        self.qkv = ColumnLinear(model.hidden, out_shape, group, bias=model.bias, std=INIT_STD)
        self.projection = RowLinear(
            model.attention_hidden, model.hidden, group, bias=model.bias, std=residual_std(model)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        b, s, _ = x.shape
        qkv = self.qkv(x).view(b, s, self.kv_heads, self.queries_per_kv + 2, self.head_dim)
        q, k, v = qkv.split((self.queries_per_kv, 1, 1), dim=3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.queries_per_kv > 1)
        return self.projection(y.transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Two matrices around a GELU, cut over TP by the inner dimension."""

    def __init__(self, model: Model, group: Group) -> None:
        super().__init__()
        self.up = ColumnLinear(model.hidden, (model.ffn_hidden,), group, bias=model.bias, std=INIT_STD)
        self.down = RowLinear(model.ffn_hidden, model.hidden, group, bias=model.bias, std=residual_std(model))

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, model: Model, group: Group) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(model.hidden)
        self.attention = Attention(model, group)
        self.mlp_norm = LayerNorm(model.hidden)
        self.mlp = Mlp(model, group)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


def residual_std(model: Model) -> float:
    """Standard deviation of the two matrices that add to the residual stream (GPT-2: / sqrt(2 L))."""
    return INIT_STD / math.sqrt(2 * model.layers)


class Stage(nn.Module):
    """The layers of one pipeline rank; the first rank adds the embedding, the last the norm and head.

    `layers_of` says which layers each virtual stage on this rank has; `stages` is the number of virtual stages of
    the whole pipeline. Layers keep their number in the whole model, so that a weight has one name on every layout.
    """

    def __init__(self, model: Model, layout: Layout, stage_split: tuple[int, ...], mesh: Mesh) -> None:
        super().__init__()
        self.stages = len(stage_split)
        begins = [0, *accumulate(stage_split)]
        own = range(mesh.pp.index, self.stages, mesh.pp.size)
        self.layers_of = {stage: range(begins[stage], begins[stage + 1]) for stage in own}
        numbers = (number for layers in self.layers_of.values() for number in layers)
        self.embedding = Embedding(model, mesh.tp) if mesh.is_first_stage else None
        self.layers = nn.ModuleDict({str(number): Layer(model, mesh.tp) for number in numbers})
        self.norm = LayerNorm(model.hidden) if mesh.is_last_stage else None
        self.head = Head(model, mesh.tp, embedding=self.embedding) if mesh.is_last_stage else None
        self.recompute_every = layout.recompute_every if layout.recompute == "full" else 0

    def forward(self, x: Tensor, stage: int) -> Tensor:
        """One virtual stage: tokens (b, s) on the first, else activations (b, s, h) -> activations (b, s, h)."""
        if stage == 0:
            assert self.embedding is not None, "the first virtual stage lies on the first rank"
            x = self.embedding(x)
        for number in self.layers_of[stage]:
            layer = self.layers[str(number)]
            again = self.recompute_every and number % self.recompute_every == 0
            x = recomputed(layer, x) if again else layer(x)
        if stage < self.stages - 1:
            return x
        assert self.norm is not None, "the last virtual stage lies on the last rank"
        return self.norm(x)  # type: ignore[no-any-return]

    def weights(self) -> Iterator[Weight]:
        """All weights of this rank."""
        return (parameter for parameter in self.parameters() if isinstance(parameter, Weight))

    def loss(self, x: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Loss of the last stage's output, summed over the tokens and times `scale`."""
        assert self.head is not None, "only the last stage sees the loss"
        return self.head.loss(x, targets, scale)
