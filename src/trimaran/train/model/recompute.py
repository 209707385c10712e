"""Recompute: forget activations and compute them again in the backward (arXiv 1604.06174): of layers, or of parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from trimaran.layout.layout import Layout
from trimaran.nouns.recompute import modules_of
from trimaran.train.model.autograd import Backward, apply

Made = Callable[..., Tensor | tuple[Tensor, ...]]


def recomputed_modules(layout: Layout) -> frozenset[str]:
    """The modules of a layer that a layout's recompute names; selective is attention without its projections."""
    modules = set(modules_of(layout.recompute)) | ({"core_attn"} if layout.recompute == "selective" else set())
    # what makes a whole mixture again makes its parts again
    return frozenset(modules - {"moe_act", "shared_experts"} if "moe" in modules else modules)


class _Recomputed(torch.autograd.Function):
    """Keeps the inputs alone. The layers here draw no random numbers, so nothing else need be kept."""

    @staticmethod
    def forward(ctx: Any, layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*inputs)
        return layer(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            again = Backward(ctx.layer(*inputs))
        again.run(dy)
        return None, *(x.grad for x in inputs)


def recomputed(layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """layer(*inputs), whose inner activations are computed again when they are needed."""
    return apply(_Recomputed, layer, *inputs)


class _Remade:
    """What `make` gives of its inputs, which alone are kept: it is made again when the backward first asks for it."""

    def __init__(self, make: Made, inputs: Sequence[Tensor]) -> None:
        self._make = make
        self._inputs = [x.detach() for x in inputs]
        self._again: tuple[Tensor, ...] = ()
        self._backward: Backward | None = None

    def outputs(self) -> tuple[Tensor, ...]:
        """What was made, once more."""
        if self._backward is None:
            for x in self._inputs:
                x.requires_grad_()
            with torch.enable_grad():
                made = _as_tuple(self._make(*self._inputs))
            self._again, self._backward = tuple(y.detach() for y in made), Backward(*made)
        return self._again

    def gradients(self, dy: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Those of the inputs, from those of what was made; nothing is kept behind them."""
        self.outputs()
        assert self._backward is not None, "what was made again has a backward"
        self._again = ()
        self._backward.run(*dy)
        inputs, self._inputs = self._inputs, []
        return [x.grad for x in inputs]


class _Forgotten(torch.autograd.Function):
    """What a `_Remade` makes, of which nothing is kept here."""

    @staticmethod
    def forward(ctx: Any, remade: _Remade, make: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.remade = remade
        return make(*inputs)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.remade.gradients(dy)


@dataclass(frozen=True)
class _Kept:
    """In place of a tensor that is kept for the backward: which of what is made again it is a view of, and how."""

    remade: _Remade
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor, of what was made again."""
        return self.remade.outputs()[self.number].as_strided(self.size, self.stride, self.offset)


def made_and_used(make: Made, use: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """use(*make(*inputs)), both of which keep what they need."""
    return use(*_as_tuple(make(*inputs)))


def made_again_and_used(make: Made, use: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The same, but of what `make` gives `use` keeps nothing: it is made again of the inputs, which are kept.

    So it frees an input of a product where that is cheap to make, as Megatron-Core's does (megatron/core/
    tensor_parallel/random.py, CheckpointWithoutOutput), and need not copy it to where it was.
    """
    if not torch.is_grad_enabled():
        return made_and_used(make, use, *inputs)
    remade = _Remade(make, inputs)
    outputs = _as_tuple(_Forgotten.apply(remade, make, *inputs))  # type: ignore[no-untyped-call]
    number_of = {y.untyped_storage()._cdata: number for number, y in enumerate(outputs)}

    def keep(tensor: Tensor) -> Tensor | _Kept:
        number = number_of.get(tensor.untyped_storage()._cdata)
        if number is None:
            return tensor
        return _Kept(remade, number, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def find(kept: Tensor | _Kept) -> Tensor:
        return kept.tensor() if isinstance(kept, _Kept) else kept

    with saved_tensors_hooks(keep, find):
        return use(*outputs)


def _as_tuple(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else made
