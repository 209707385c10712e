"""Weights: how each parameter is declared, cut over TP ranks, and drawn from the global seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trimaran.nouns.model import Model
from trimaran.train.comm.mesh import Holders, WeightKind

INIT_STD = 0.02
Init = Literal["normal", "zeros", "ones"]


@dataclass(frozen=True)
class WeightSpec:
    """What a parameter is in the whole model, whatever the layout.

    `shape` is the full shape; `shard_dim` the dimension that TP cuts (None: every TP rank holds all of it). Its `kind`
    says which ranks hold it (`Mesh.holders`); experts' have a dimension 0 of experts, which EP deals out. Rows of
    dimension 0 from `real_rows` on are padding and stay zero. A `tied_copy` is the head's copy of the embedding on
    another pipeline stage: it is drawn under the name `drawn_as`, its gradient is summed with that of the embedding,
    and it is counted once. Of a weight that is `summed_over_tp` every TP rank holds all, and multiplies features of its
    own with it: the gradient is the sum of theirs.
    """

    shape: tuple[int, ...]
    shard_dim: int | None = None
    init: Init = "normal"
    std: float = INIT_STD
    real_rows: int | None = None
    drawn_as: str | None = None
    tied_copy: bool = False
    kind: WeightKind = "dense"
    summed_over_tp: bool = False

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to biases and norms."""
        return self.init == "normal"

    def local_shape(self, tp: int, ep: int = 1) -> tuple[int, ...]:
        """Shape of what a rank holds, of `tp` that cut a weight (ETP of experts) and `ep` that experts are dealt to."""
        first, *others = (n // tp if dim == self.shard_dim else n for dim, n in enumerate(self.shape))
        return (first // ep, *others)


def residual_std(model: Model) -> float:
    """Standard deviation of the two matrices that add to the residual stream (GPT-2: / sqrt(2 L))."""
    return INIT_STD / math.sqrt(2 * model.layers)


class Weight(nn.Parameter):
    """A parameter whose gradient is summed over micro-batches in `main_grad`.

    `main_grad` is a view into the rank's flat gradient buffer. The matrix products of the backward add into it
    directly, so a weight's gradient is written once per micro-batch and never exists a second time. A zero-bubble
    schedule takes these products out of the backward: they wait in `deferred` until the schedule comes to them.
    Where it is `eight_bit` a layer's linear products with it read 8 bit (narrow.py).
    """

    main_grad: Tensor
    eight_bit: bool = False
    deferred: list[Callable[[], None]] | None = None

    def accumulate(self, add: Callable[[], None]) -> None:
        """Let `add` add to `main_grad`: now, or when the schedule comes to it."""
        if self.deferred is None:
            add()
        else:
            self.deferred.append(add)


class DeclaredModule(nn.Module):
    """A module that declares its weights before they have memory.

    Weights are declared on the meta device and later placed into a flat buffer (`FlatWeights`), which also draws
    their values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, WeightSpec] = {}

    def declare(self, name: str, spec: WeightSpec | None, tp: int = 1, ep: int = 1) -> None:
        """Register the weight `name` of this module with its local shape; None for a weight that the model lacks."""
        if spec is not None:
            self.specs[name] = spec
        weight = None if spec is None else Weight(torch.empty(spec.local_shape(tp, ep), device="meta"))
        self.register_parameter(name, weight)


def declared_weights(module: nn.Module) -> dict[str, tuple[DeclaredModule, str, WeightSpec]]:
    """All declared weights under `module`: qualified name -> (owner, name in the owner, spec)."""
    declared: dict[str, tuple[DeclaredModule, str, WeightSpec]] = {}
    for prefix, owner in module.named_modules():
        if isinstance(owner, DeclaredModule):
            for name, spec in owner.specs.items():
                declared[f"{prefix}.{name}" if prefix else name] = (owner, name, spec)
    return declared


def generator_of(seed: int, name: str) -> torch.Generator:
    """A generator that (seed, name) seeds."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


# Values of the parameter of a name and spec in the whole model, in fp32 on the CPU; padding of the vocabulary is zero.
Initial = Callable[[str, WeightSpec], Tensor]


def drawn(seed: int) -> Initial:
    """Values drawn from a generator that (seed, name) seeds, so that the model is the same on every layout."""

    def values(name: str, spec: WeightSpec) -> Tensor:
        full = torch.zeros(spec.shape) if spec.init != "ones" else torch.ones(spec.shape)
        if spec.init == "normal":
            real = full if spec.real_rows is None else full[: spec.real_rows]
            real.normal_(0.0, spec.std, generator=generator_of(seed, spec.drawn_as or name))
        return full

    return values


def local_part(full: Tensor, spec: WeightSpec, holders: Holders) -> Tensor:
    """The slice of a whole parameter that this one of its holders has."""
    dealt = full.chunk(holders.dealt.size)[holders.dealt.index]
    return dealt if spec.shard_dim is None else dealt.chunk(holders.cut.size, dim=spec.shard_dim)[holders.cut.index]
