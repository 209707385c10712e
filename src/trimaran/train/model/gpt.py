"""The GPT: pre-norm transformer layers, and the part of them that one pipeline rank holds.

Shapes are (b, s, h): sequences of a micro-batch, tokens of a sequence, hidden. Tensor parallelism cuts the matrices
inside attention, MLP, embedding and head (tensor_parallel.py, vocabulary.py); pipeline parallelism gives each rank
a few layers (`Stage`); data parallelism is applied from outside (engine/data_parallel.py).
"""

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

    def __init__(self, model: Model, tp_group: Group, positions: Positions, *, recompute_attention: bool) -> None:
        super().__init__()
        self.attention_norm = make_norm(model)
        self.attention = Attention(model, tp_group, positions, recompute=recompute_attention)
        self.mlp_norm = make_norm(model)
        self.mlp = make_mlp(model, tp_group)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """(b, s, h) -> (b, s, h)."""
        x = x + self.attention(self.attention_norm(x), documents)
        y: Tensor = self.mlp(self.mlp_norm(x))
        return x + y


class Stage(nn.Module):
    """The layers of one pipeline rank; the first rank has the embedding too, the last the final norm and the head.

    A rank holds one virtual stage, or several under an interleaved schedule: `virtual_stages` counts those of the
    whole pipeline, and `layers_of` has the layers of each that is on this rank. Layers keep their number in the whole
    model, so that a weight has the same name on every layout.
    """

    def __init__(self, model: Model, layout: Layout, stage_split: tuple[int, ...], mesh: Mesh) -> None:
        super().__init__()
        self.virtual_stages = len(stage_split)
        begins = [0, *accumulate(stage_split)]
        local_stages = range(mesh.pp.index, self.virtual_stages, mesh.pp.size)
        self.layers_of = {stage: range(begins[stage], begins[stage + 1]) for stage in local_stages}
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
        """Run one virtual stage: tokens (b, s) on the first, else activations (b, s, h) -> activations (b, s, h).

        `documents` (b, s) numbers the document of each token: attention then stays within a document.
        """
        if stage == 0:
            assert self.embedding is not None, "the first virtual stage lies on the first rank"
            x = self.embedding(x, documents)
            if self.embedding_norm is not None:
                x = self.embedding_norm(x)
        for number in self.layers_of[stage]:
            layer = self.layers[str(number)]
            recompute = self.recompute_every and number % self.recompute_every == 0
            x = recomputed(partial(layer, documents=documents), x) if recompute else layer(x, documents)
        if stage < self.virtual_stages - 1:
            return x
        assert self.norm is not None, "the last virtual stage lies on the last rank"
        normed: Tensor = self.norm(x)
        return normed

    def weights(self) -> Iterator[Weight]:
        """All weights of this rank."""
        return (parameter for parameter in self.parameters() if isinstance(parameter, Weight))

    def loss(self, x: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Cross-entropy of the last stage's output (b, s, h), summed over the tokens and multiplied by `scale`."""
        assert self.head is not None, "only the last stage sees the loss"
        loss: Tensor = self.head(x, targets, scale)
        return loss
