"""The GPT: pre-norm transformer layers, and the part of them that one pipeline stage holds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate

from torch import Tensor, nn

from trimaran.layout.layout import Layout
from trimaran.nouns.model import Model
from trimaran.train.comm.group import Group
from trimaran.train.comm.mesh import Mesh
from trimaran.train.model.attention import Attention
from trimaran.train.model.mlp import make_mlp
from trimaran.train.model.norm import make_norm
from trimaran.train.model.positions import Positions
from trimaran.train.model.recompute import recomputed
from trimaran.train.model.vocabulary import Embedding, Head
from trimaran.train.model.weight import Weight


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, model: Model, group: Group, positions: Positions, *, recompute_attention: bool) -> None:
        super().__init__()
        self.attention_norm = make_norm(model)
        self.attention = Attention(model, group, positions, recompute=recompute_attention)
        self.mlp_norm = make_norm(model)
        self.mlp = make_mlp(model, group)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        x = x + self.attention(self.attention_norm(x), documents)
        y: Tensor = self.mlp(self.mlp_norm(x))
        return x + y


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
        positions = Positions(model, mesh.tp)
        self.embedding = Embedding(model, mesh.tp) if mesh.is_first_stage else None
        self.embedding_norm = make_norm(model) if mesh.is_first_stage and model.embedding_norm else None
        selective = layout.recompute == "selective"
        layers = {str(n): Layer(model, mesh.tp, positions, recompute_attention=selective) for n in numbers}
        self.layers = nn.ModuleDict(layers)
        self.norm = make_norm(model) if mesh.is_last_stage else None
        self.head = Head(model, mesh.tp, embedding=self.embedding) if mesh.is_last_stage else None
        self.recompute_every = layout.recompute_every if layout.recompute == "full" else 0

    def forward(self, x: Tensor, stage: int, documents: Tensor | None = None) -> Tensor:
        """One virtual stage: tokens (b, s) on the first, else activations (b, s, h) -> activations (b, s, h).

        `documents` (b, s) numbers the document of each token: attention then stays within them.
        """
        if stage == 0:
            assert self.embedding is not None, "the first virtual stage lies on the first rank"
            x = self.embedding(x, documents)
            if self.embedding_norm is not None:
                x = self.embedding_norm(x)
        for number in self.layers_of[stage]:
            layer = self.layers[str(number)]
            again = self.recompute_every and number % self.recompute_every == 0
            x = recomputed(partial(layer, documents=documents), x) if again else layer(x, documents)
        if stage < self.stages - 1:
            return x
        assert self.norm is not None, "the last virtual stage lies on the last rank"
        normed: Tensor = self.norm(x)
        return normed

    def weights(self) -> Iterator[Weight]:
        """All weights of this rank."""
        return (parameter for parameter in self.parameters() if isinstance(parameter, Weight))

    def loss(self, x: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Loss of the last stage's output, summed over the tokens and times `scale`."""
        assert self.head is not None, "only the last stage sees the loss"
        loss: Tensor = self.head(x, targets, scale)
        return loss
