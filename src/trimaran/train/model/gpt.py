"""The GPT: transformer layers, and the part of them that one pipeline rank holds.

Shapes are (b, s, h): sequences of a micro-batch, tokens of a sequence, hidden. Tensor parallelism cuts the matrices
inside attention, MLP, embedding and head (tensor_parallel.py, vocabulary.py); pipeline parallelism gives each rank
a few layers (`Stage`); context parallelism gives it a part of each sequence (context_attention.py), whose tokens s then
are; data parallelism is applied from outside (engine/data_parallel.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import accumulate

from torch import Tensor, nn

from trimaran.layout.layout import Layout
from trimaran.nouns.model import Model
from trimaran.train.comm.mesh import Mesh
from trimaran.train.model.attention import make_attention
from trimaran.train.model.mixture.mixture import Mixture
from trimaran.train.model.mixture.router import Router
from trimaran.train.model.mlp import make_mlp
from trimaran.train.model.norm import make_norm
from trimaran.train.model.offload import kept_on_host
from trimaran.train.model.positions import Positions
from trimaran.train.model.recompute import made_again_and_used, made_and_used, recomputed, recomputed_modules
from trimaran.train.model.vocabulary import Embedding, Head
from trimaran.train.model.weight import Weight


class Layer(nn.Module):
    """One transformer layer, with norms of what attention and MLP read, of what they give, or of both.

    `number` is its place in the whole model, from 0. Modules of `recompute` (`trimaran.operators.modules`) are computed
    again in the backward; norms of what attention and MLP read so that what they give is not kept.
    """

    def __init__(
        self, model: Model, mesh: Mesh, positions: Positions, number: int, *, recompute: Collection[str] = ()
    ) -> None:
        super().__init__()
        before, after = model.norm_placement != "after", model.norm_placement != "before"
        self.parallel = model.parallel_residual
        self.attention_norm = make_norm(model) if before else nn.Identity()
        self.attention = make_attention(model, mesh.tp, positions, window=model.window_of(number), recompute=recompute)
        self.attention_output_norm = make_norm(model) if after else nn.Identity()
        self.mlp_norm = make_norm(model) if before else nn.Identity()
        self.mlp: nn.Module
        if model.experts and number >= model.dense_layers:
            self.mlp, module = Mixture(model, mesh, number, recompute=recompute), "moe"
        else:
            self.mlp, module = make_mlp(model, mesh.tp, model.ffn_hidden), "mlp"
        self.recompute_mlp = module in recompute
        self.normed = made_again_and_used if before and "layernorm" in recompute else made_and_used
        self.mlp_output_norm = make_norm(model) if after else nn.Identity()

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """(b, s, h) -> (b, s, h).

        Sums go where what attention or MLP gave lies, which nothing else reads.
        """
        attend = partial(self.attention, documents=documents)
        attended: Tensor = self.attention_output_norm(self.normed(self.attention_norm, attend, x)).add_(x)
        read = x if self.parallel else attended
        mlp = partial(recomputed, self.mlp) if self.recompute_mlp else self.mlp
        y: Tensor = self.mlp_output_norm(self.normed(self.mlp_norm, mlp, read)).add_(attended)
        return y


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
        numbers = [number for layers in self.layers_of.values() for number in layers]
        positions = Positions(model, mesh.tp, mesh.sequence)
        self.embedding = Embedding(model, mesh.tp, mesh.sequence) if mesh.is_first_stage else None
        self.embedding_norm = make_norm(model) if mesh.is_first_stage and model.embedding_norm else None
        modules = recomputed_modules(layout)
        layers = {str(n): Layer(model, mesh, positions, n, recompute=modules) for n in numbers}
        self.layers = nn.ModuleDict(layers)
        self.norm = make_norm(model) if mesh.is_last_stage else None
        self.head = Head(model, mesh.tp, embedding=self.embedding) if mesh.is_last_stage else None
        self.keep = kept_on_host if layout.offload == "activations" else nullcontext
        # counted over the layers of this rank, so that each rank makes its share of them again
        self.recomputed = frozenset(numbers[:: layout.recompute_every] if layout.recompute == "full" else ())

    def forward(self, x: Tensor, stage: int, documents: Tensor | None = None) -> Tensor:
        """Run one virtual stage: tokens (b, s) on the first, else activations (b, s, h) -> activations (b, s, h).

        `documents` numbers the document of each token, of whole sequences: attention then stays within a document.
        """
        if stage == 0:
            assert self.embedding is not None, "the first virtual stage lies on the first rank"
            x = self.embedding(x, documents)
            if self.embedding_norm is not None:
                x = self.embedding_norm(x)
        for number in self.layers_of[stage]:
            layer = self.layers[str(number)]
            again = number in self.recomputed
            with self.keep():
                x = recomputed(partial(layer, documents=documents), x) if again else layer(x, documents)
        if stage < self.virtual_stages - 1:
            return x
        assert self.norm is not None, "the last virtual stage lies on the last rank"
        normed: Tensor = self.norm(x)
        return normed

    def routers(self) -> Iterator[Router]:
        """The routers of this rank's mixtures of experts."""
        return (module for module in self.modules() if isinstance(module, Router))

    def weights(self) -> Iterator[Weight]:
        """All weights of this rank."""
        return (parameter for parameter in self.parameters() if isinstance(parameter, Weight))

    def loss(self, x: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Cross-entropy of the last stage's output (b, s, h), summed over the tokens and multiplied by `scale`."""
        assert self.head is not None, "only the last stage sees the loss"
        loss: Tensor = self.head(x, targets, scale)
        return loss
