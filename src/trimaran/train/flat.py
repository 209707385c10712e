"""Flat buffers: the weights and gradients of a rank, and the master weights that it owns.

Few large tensors make the data-parallel sum, the gradient norm and the optimizer step a handful of large
operations instead of hundreds of small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from trimaran.cluster import Precision
from trimaran.layout import Layout
from trimaran.train.mesh import Mesh
from trimaran.train.units import Span, merged, own_span, plan_units, runs
from trimaran.train.weight import Initial, Weight, WeightSpec, declared_weights, local_part

COMPUTE_DTYPE: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16_pure": torch.bfloat16,
}

# Gradients of one fp32 norm, before norms are added up in fp64.
NORM_ROW = 1024


@dataclass(frozen=True)
class Place:
    """Where one weight lies in the rank's flat coordinates."""

    weight: Weight
    spec: WeightSpec
    begin: int

    @property
    def end(self) -> int:
        """One past its last element."""
        return self.begin + self.weight.numel()

    @property
    def span(self) -> Span:
        """All its elements."""
        return Span(self.begin, self.end)


@dataclass(frozen=True)
class Unit:
    """Weights that travel together, with the memory they are computed from and their gradients are summed in.

    `own` is the part of the unit that this rank owns.
    """

    name: str
    span: Span
    own: Span
    weights: Tensor
    grads: Tensor


class FlatWeights:
    """Weights, gradients and master weights of one rank.

    * fp32: weights and gradients in fp32.
    * bf16: weights in bf16 for computing, master weights and summed gradients in fp32.
    * bf16_pure: everything in bf16.

    `owned` are the spans whose master weights and optimizer state this rank holds, in the rank's flat
    coordinates: one over everything without ZeRO. `master` and `grads` hold one tensor for each of them, a
    writable view, and so does each entry of the optimizer's `state`. `places` says where a weight lies in the
    same coordinates. Whoever writes to `master` publishes it afterwards, for the weights to follow.
    """

    def __init__(self, module: nn.Module, layout: Layout, mesh: Mesh, initial: Initial, device: torch.device) -> None:
        declared = declared_weights(module)
        specs = {name: spec for name, (_, _, spec) in declared.items()}
        sizes = {name: getattr(owner, attribute).numel() for name, (owner, attribute, _) in declared.items()}
        plan = plan_units(sizes, specs, mesh.tp.index, layout.dp if layout.zero_stage else 1)
        own_of = {extent.name: own_span(extent.span, layout, mesh.dp.index) for extent in plan.extents}
        self.owned = merged(own_of.values())

        compute = COMPUTE_DTYPE[layout.precision]
        self.separate_master = layout.precision == "bf16"
        weights = torch.zeros(plan.size, dtype=compute, device=device)
        held = torch.zeros(sum(map(len, self.owned)), device=device) if self.separate_master else None
        grads = torch.zeros(plan.size, dtype=torch.float32 if self.separate_master else compute, device=device)
        self.master = self._views(weights) if held is None else self._split(held)
        self.grads = self._views(grads)
        self.units = tuple(
            Unit(e.name, e.span, own_of[e.name], weights[e.span.begin : e.span.end], grads[e.span.begin : e.span.end])
            for e in plan.extents
        )

        self.places: dict[str, Place] = {}
        for name, (owner, attribute, spec) in declared.items():
            values = local_part(initial(name, spec), spec, mesh.tp.index, mesh.tp.size)
            begin = plan.begins[name]
            span = Span(begin, begin + values.numel())
            for holder, master in zip(self.owned, self.master, strict=True):
                part = span.within(holder)
                master[part.slice_in(holder)] = values.reshape(-1)[part.slice_in(span)].to(master.dtype)
            unit = next(unit for unit in self.units if len(span.within(unit.span)))
            unit.weights[span.slice_in(unit.span)] = values.reshape(-1).to(compute)
            weight = Weight(unit.weights[span.slice_in(unit.span)].view(values.shape))
            weight.main_grad = unit.grads[span.slice_in(unit.span)].view(values.shape)
            weight.register_post_accumulate_grad_hook(_move_to_main_grad)  # type: ignore[no-untyped-call]
            setattr(owner, attribute, weight)
            self.places[name] = Place(weight, spec, begin)

        self.decaying = runs(self.owned, (span for span, kind in plan.kinds if kind.decays))
        self.constant = runs(self.owned, (span for span, kind in plan.kinds if not kind.decays))
        counted = merged(span for span, kind in plan.kinds if kind.counted)
        self._counted = runs(self.owned, counted)
        real = [place.span for place in self.places.values()]
        self.parameters = _common(real, counted)
        self._owned_parameters = _common(real, [a.within(b) for a in counted for b in self.owned])

    def _views(self, everything: Tensor) -> tuple[Tensor, ...]:
        """The owned parts of a tensor over all weights."""
        return tuple(everything[span.begin : span.end] for span in self.owned)

    def _split(self, held: Tensor) -> tuple[Tensor, ...]:
        """A tensor over the owned spans, one after the other, as one view each."""
        return torch.split(held, [len(span) for span in self.owned])

    def zeros_like_owned(self) -> tuple[Tensor, ...]:
        """Zeros for each owned span, of the dtype of the master weights."""
        if not self.owned:
            return ()
        size = sum(map(len, self.owned))
        return self._split(torch.zeros(size, dtype=self.master[0].dtype, device=self.master[0].device))

    def owned_part(self, unit: Unit, of: Sequence[Tensor]) -> Tensor:
        """What `of`, one tensor for each owned span, holds of the unit's own part."""
        for holder, tensor in zip(self.owned, of, strict=True):
            if len(unit.own.within(holder)):
                return tensor[unit.own.slice_in(holder)]
        return unit.weights[:0]

    def publish(self) -> None:
        """Let the weights follow the master weights."""
        if self.separate_master:
            for unit in self.units:
                unit.weights[unit.own.slice_in(unit.span)].copy_(self.owned_part(unit, self.master))

    def clear_grads(self) -> None:
        """Set all gradients to zero."""
        for unit in self.units:
            unit.grads.zero_()

    def squared_norm(self) -> Tensor:
        """Sum of squares of the gradients that this rank owns and counts, as an fp64 scalar.

        Norms of short rows, then their sum in fp64: one fp32 norm over 17 million gradients is
        off by 0.1%, and by a different 0.1% on every layout.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.units[0].weights.device)
        for run in self._counted:
            grads = self.grads[run.held][run.within]
            whole = len(grads) // NORM_ROW * NORM_ROW
            for rows in (grads[:whole].view(-1, NORM_ROW), grads[whole:].view(1, -1)):
                total += torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).double().square().sum()
        return total

    def zeros(self) -> int:
        """How many of the gradients that this rank owns and counts are exactly zero."""
        return self._owned_parameters - sum(nonzero(self.grads[run.held][run.within]) for run in self._counted)


def _common(some: Sequence[Span], others: Sequence[Span]) -> int:
    """Elements that two sets of spans have in common."""
    return sum(len(a.within(b)) for a in some for b in others)


def nonzero(tensor: Tensor) -> int:
    """How many elements are not zero.

    On the CPU by their bits, through NumPy: PyTorch 2.13 takes 26 ms for 17 million, NumPy 4. A
    negative zero counts as not zero.
    """
    if tensor.is_cuda:
        return int(torch.count_nonzero(tensor))
    bits = torch.int32 if tensor.element_size() == 4 else torch.int16
    return int(np.count_nonzero(tensor.view(bits).numpy()))


def _move_to_main_grad(weight: Tensor) -> None:
    """Norms and small biases get their gradient from autograd; it is added up here.

    Autograd calls this also for a matrix whose product has added to `main_grad` by itself.
    """
    assert isinstance(weight, Weight)
    if weight.grad is not None:
        weight.main_grad.add_(weight.grad)
        weight.grad = None
