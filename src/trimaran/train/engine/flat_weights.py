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

from trimaran.layout.layout import Layout
from trimaran.nouns.precision import PRECISIONS
from trimaran.train.comm.mesh import Mesh
from trimaran.train.engine.units import Span, merged, own_span, plan_units, runs
from trimaran.train.model.weight import Initial, Weight, WeightSpec, declared_weights, local_part

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


def compute_dtype(layout: Layout) -> torch.dtype:
    """What the layout's weights and activations are held and multiplied in."""
    dtype: torch.dtype = getattr(torch, PRECISIONS[layout.precision].dtype)
    return dtype


class FlatWeights:
    """Weights, gradients and master weights of one rank.

    * fp32: weights and gradients in fp32.
    * fp16, bf16: weights in 16 bit for computing, master weights and summed gradients in fp32.
    * bf16_pure: everything in bf16.

    `owned` are the spans whose master weights and optimizer state this rank holds, in the rank's flat
    coordinates: one over everything without ZeRO. `master` and `grads` hold one tensor for each of them, a
    writable view, and so does each entry of the optimizer's `state`. `places` says where a weight lies in the
    same coordinates. Whoever writes to `master` has `DataParallel.publish` follow.

    Under ZeRO 2 the units' `grads`, under ZeRO 3 their `weights` too, have no memory but while they are at work.
    """

    def __init__(self, module: nn.Module, layout: Layout, mesh: Mesh, initial: Initial, device: torch.device) -> None:
        self.zero_stage = layout.zero_stage if layout.dp > 1 else 0
        declared = declared_weights(module)
        specs = {name: spec for name, (_, _, spec) in declared.items()}
        sizes = {name: getattr(owner, attribute).numel() for name, (owner, attribute, _) in declared.items()}
        plan = plan_units(sizes, specs, mesh.tp.index, layout.dp if self.zero_stage else 1)
        own_of = {extent.name: own_span(extent.span, layout, mesh.dp.index) for extent in plan.extents}
        self.owned = merged(own_of.values())

        compute = compute_dtype(layout)
        in_fp32 = PRECISIONS[layout.precision].master
        self._dtype, self._device = torch.float32 if in_fp32 else compute, device
        # without master weights of their own, ranks that hold all weights own views of them
        self._apart = in_fp32 or self.zero_stage == 3
        spans = [extent.span for extent in plan.extents]
        weights, whole_weights = _memory(plan.size, spans, compute, device, passing=self.zero_stage == 3)
        grads, whole_grads = _memory(plan.size, spans, self._dtype, device, passing=self.zero_stage >= 2)
        self.master = self.zeros_like_owned() if self._apart else tuple(weights[s.begin : s.end] for s in self.owned)
        self.grads = (
            self.zeros_like_owned() if self.zero_stage >= 2 else tuple(grads[s.begin : s.end] for s in self.owned)
        )
        self._all_grads = self.grads if self.zero_stage >= 2 else (grads,)
        self.units = tuple(
            Unit(extent.name, extent.span, own_of[extent.name], *tensors)
            for extent, *tensors in zip(plan.extents, whole_weights, whole_grads, strict=True)
        )

        self.places: dict[str, Place] = {}
        for name, (owner, attribute, spec) in declared.items():
            values = local_part(initial(name, spec), spec, mesh.tp.index, mesh.tp.size)
            begin = plan.begins[name]
            span = Span(begin, begin + values.numel())
            unit = next(unit for unit in self.units if len(span.within(unit.span)))
            inside = span.slice_in(unit.span)
            passing = [whole for whole in (unit.weights, unit.grads) if take_memory(whole)]
            # .data: a gather that fills the memory anew changes nothing that autograd has to know of
            weight = Weight(unit.weights.data[inside].view(values.shape))
            weight.main_grad = unit.grads.data[inside].view(values.shape)
            weight.register_post_accumulate_grad_hook(_move_to_main_grad)  # type: ignore[no-untyped-call]
            setattr(owner, attribute, weight)
            self.places[name] = Place(weight, spec, begin)
            for holder, master in zip(self.owned, self.master, strict=True):
                part = span.within(holder)
                if len(part):
                    master[part.slice_in(holder)] = values.reshape(-1)[part.slice_in(span)].to(master.dtype)
            if self.zero_stage < 3:
                unit.weights[inside] = values.reshape(-1).to(compute)
            for whole in passing:
                give_memory_back(whole)

        self.decaying = runs(self.owned, (span for span, kind in plan.kinds if kind.decays))
        self.constant = runs(self.owned, (span for span, kind in plan.kinds if not kind.decays))
        counted = merged(span for span, kind in plan.kinds if kind.counted)
        self._counted = runs(self.owned, counted)
        real = [place.span for place in self.places.values()]
        self.parameters = _common(real, counted)
        self._owned_parameters = _common(real, [a.within(b) for a in counted for b in self.owned])

    def zeros_like_owned(self) -> tuple[Tensor, ...]:
        """Zeros for each owned span, of the dtype of the master weights."""
        lengths = [len(span) for span in self.owned]
        return torch.split(torch.zeros(sum(lengths), dtype=self._dtype, device=self._device), lengths)

    def unit(self, name: str) -> Unit:
        """The unit of that name."""
        return next(unit for unit in self.units if unit.name == name)

    def owned_part(self, unit: Unit, of: Sequence[Tensor]) -> Tensor:
        """What `of`, one tensor for each owned span, holds of the unit's own part."""
        for holder, tensor in zip(self.owned, of, strict=True):
            if len(unit.own.within(holder)):
                return tensor[unit.own.slice_in(holder)]
        return torch.empty(0, dtype=self._dtype, device=self._device)

    def owned_parts(self, spans: Sequence[Span], of: Sequence[Tensor]) -> list[Tensor]:
        """What `of`, one tensor for each owned span, holds of the spans."""
        return [of[run.held][run.within] for run in runs(self.owned, sorted(spans, key=lambda span: span.begin))]

    def refresh(self, unit: Unit) -> None:
        """Let the own part of the unit's weights follow its master weights."""
        if self._apart:
            unit.weights[unit.own.slice_in(unit.span)].copy_(self.owned_part(unit, self.master))

    def clear_grads(self) -> None:
        """Set all gradients to zero."""
        for grads in self._all_grads:
            grads.zero_()

    def squared_norm(self) -> Tensor:
        """Sum of squares of the gradients that this rank owns and counts, as an fp64 scalar.

        Norms of short rows, then their sum in fp64: one fp32 norm over 17 million gradients is
        off by 0.1%, and by a different 0.1% on every layout.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for run in self._counted:
            grads = self.grads[run.held][run.within]
            whole = len(grads) // NORM_ROW * NORM_ROW
            for rows in (grads[:whole].view(-1, NORM_ROW), grads[whole:].view(1, -1)):
                total += torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).double().square().sum()
        return total

    def zeros(self) -> int:
        """How many of the gradients that this rank owns and counts are exactly zero."""
        return self._owned_parameters - sum(nonzero(self.grads[run.held][run.within]) for run in self._counted)


def take_memory(tensor: Tensor) -> bool:
    """Give memory to a tensor that has none; whether it had none."""
    storage = tensor.untyped_storage()
    if storage.size():
        return False
    storage.resize_(tensor.numel() * tensor.element_size())
    return True


def give_memory_back(tensor: Tensor) -> None:
    """Free a tensor's memory; it and its views keep their shapes."""
    tensor.untyped_storage().resize_(0)


def _memory(
    size: int, spans: Sequence[Span], dtype: torch.dtype, device: torch.device, *, passing: bool
) -> tuple[Tensor, list[Tensor]]:
    """A tensor over all weights and its parts at the spans; passing parts have a memory each, and it comes and goes."""
    if not passing:
        everything = torch.zeros(size, dtype=dtype, device=device)
        return everything, [everything[span.begin : span.end] for span in spans]
    parts = [torch.empty(len(span), dtype=dtype, device=device) for span in spans]
    for part in parts:
        give_memory_back(part)
    return torch.empty(0, dtype=dtype, device=device), parts


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
