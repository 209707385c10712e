"""Flat buffers: the weights and gradients of a rank, and the master weights that it owns.

Few large tensors make the data-parallel sum, the gradient norm and the optimizer step a handful of large
operations instead of hundreds of small ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from trimaran.layout.compression import BLOCK
from trimaran.layout.layout import Layout
from trimaran.nouns.precision import PRECISIONS
from trimaran.train.comm.mesh import Holders, Mesh
from trimaran.train.engine.unit_memory import UnitMemory
from trimaran.train.engine.units import LINE, Span, map_weights, owned_slices, unit_kind
from trimaran.train.model.weight import Initial, Weight, WeightSpec, declared_weights, local_part
from trimaran.train.model.wide_sums import pieces

# Gradients whose squares are added up in fp32, before these sums are added up in fp64.
NORM_ROW = 1024


@dataclass(frozen=True)
class Place:
    """Where a weight lies in the rank's flat coordinates, and the ranks that hold it."""

    weight: Weight
    spec: WeightSpec
    span: Span
    holders: Holders


@dataclass(frozen=True, eq=False)
class Unit:
    """Weights that are summed, gathered and freed together, as computed with, and their gradients.

    `owned` is the part of the unit whose master weights and optimizer state this rank holds; `holders` hold the unit.
    """

    name: str
    span: Span
    owned: Span
    holders: Holders
    weights: Tensor
    grads: Tensor

    def owned_part(self, of: Tensor) -> Tensor:
        """The owned part of the unit's `weights` or `grads`."""
        return of[self.owned.slice_in(self.span)]


def compute_dtype(layout: Layout) -> torch.dtype:
    """The type in which the layout's weights and activations are held and multiplied."""
    dtype: torch.dtype = getattr(torch, PRECISIONS[layout.precision].dtype)
    return dtype


class FlatWeights:
    """Weights, gradients and master weights of one rank.

    * fp32: weights and gradients in fp32.
    * fp16, bf16, fp8: weights in 16 bit for computing, master weights and summed gradients in fp32.
    * bf16_pure: everything in bf16.

    `owned` are the spans whose master weights and optimizer state this rank holds, in the rank's flat
    coordinates: a single span over everything without ZeRO. `master` and `grads` hold a tensor for each of them, a
    writable view, and so does each entry of the optimizer's `state`. `counted` are the parts of the owned spans that
    this rank counts where a sum, or a checkpoint, is to have every weight of the model once, `counted_of_replica` where
    it is to have it once of every replica. `places` says where a
    weight lies in the same coordinates. Whoever writes to `master` has to call `DataParallel.publish`. Where
    `master_is_weights`, these are the weights themselves: under ZeRO 3 the part that this rank keeps of them.

    Under ZeRO 2 the units' `grads`, under ZeRO 3 their `weights` too, have memory only while they are worked with:
    whoever works with them takes it from `grads_memory` and `weights_memory`, and gives it back.
    """

    def __init__(self, module: nn.Module, layout: Layout, mesh: Mesh, initial: Initial, device: torch.device) -> None:
        is_shared = any(holders.sharers.size > 1 for holders in mesh.holders.values())
        self.zero_stage = layout.zero_stage if is_shared else 0
        declared = declared_weights(module)
        specs = {name: spec for name, (_, _, spec) in declared.items()}
        sizes = {name: getattr(owner, attribute).numel() for name, (owner, attribute, _) in declared.items()}
        # a block of compressed numbers has no part of two weights: its rounding is the same on all ranks that hold one
        weight_map = map_weights(sizes, specs, mesh.holders, LINE if layout.compression == "none" else BLOCK)
        self.owned, self.counted = weight_map.owned, weight_map.counted()
        self.counted_of_replica = weight_map.counted(of_replica=True)

        compute = compute_dtype(layout)
        self.master_is_weights = not (in_fp32 := PRECISIONS[layout.precision].master)
        self._dtype, self._device = torch.float32 if in_fp32 else compute, device
        # otherwise `master` are views of the weights that are computed with
        self._has_master_copy = in_fp32 or self.zero_stage == 3
        spans, size = {name: unit.span for name, unit in weight_map.units.items()}, weight_map.size
        weights, unit_weights, self.weights_memory = _memory(
            size, spans, compute, device, transient=self.zero_stage == 3
        )
        grads, unit_grads, self.grads_memory = _memory(size, spans, self._dtype, device, transient=self.zero_stage >= 2)
        self.master = self.zeros_like_owned() if self._has_master_copy else _cut(weights, self.owned)
        self.grads = self.zeros_like_owned() if self.zero_stage >= 2 else _cut(grads, self.owned)
        self._all_grads = self.grads if self.zero_stage >= 2 else (grads,)
        self.units = tuple(
            Unit(name, unit.span, unit.owned, unit.holders, *tensors)
            for (name, unit), *tensors in zip(weight_map.units.items(), unit_weights, unit_grads, strict=True)
        )

        self.places: dict[str, Place] = {}
        eight_bit = PRECISIONS[layout.precision].narrow is not None
        for name, (owner, attribute, spec) in declared.items():
            holders = mesh.holders[spec.kind]
            values = local_part(initial(name, spec), spec, holders)
            begin = weight_map.begins[name]
            span = Span(begin, begin + values.numel())
            unit = next(unit for unit in self.units if len(span.within(unit.span)))
            in_unit = span.slice_in(unit.span)
            if self.zero_stage >= 2:
                self.grads_memory.take(unit.grads)
            if self.zero_stage == 3:
                self.weights_memory.take(unit.weights)
            # .data: a gather that fills the memory again is no change that autograd has to see
            weight = Weight(unit.weights.data[in_unit].view(values.shape))
            weight.main_grad = unit.grads.data[in_unit].view(values.shape)
            weight.eight_bit = eight_bit
            weight.register_post_accumulate_grad_hook(_move_to_main_grad)  # type: ignore[no-untyped-call]
            setattr(owner, attribute, weight)
            self.places[name] = Place(weight, spec, span, holders)
            for owned, master in zip(self.owned, self.master, strict=True):
                part = span.within(owned)
                if len(part):
                    master[part.slice_in(owned)] = values.reshape(-1)[part.slice_in(span)].to(master.dtype)
            if self.zero_stage < 3:
                unit.weights[in_unit] = values.reshape(-1).to(compute)
            self.grads_memory.give_back(unit.grads)
            self.weights_memory.give_back(unit.weights)

        treatments = weight_map.treatments
        self.decaying = owned_slices(self.owned, (span for span, treatment in treatments if treatment.decays))
        self.not_decaying = owned_slices(self.owned, (span for span, treatment in treatments if not treatment.decays))
        # replicas that train apart have gradients of their own
        counted = self.counted_of_replica if layout.local_steps else self.counted
        self._counted, self._parameters = owned_slices(self.owned, counted), self._number_in(counted)
        self.parameters = self._number_in(self.counted)

    def _number_in(self, spans: Sequence[Span]) -> int:
        """How many parameters lie in the spans, without padding."""
        return sum(len(place.span.within(span)) for place in self.places.values() for span in spans)

    def zeros_like_owned(self) -> tuple[Tensor, ...]:
        """Zeros for each owned span, of the dtype of the master weights."""
        lengths = [len(span) for span in self.owned]
        return torch.split(torch.zeros(sum(lengths), dtype=self._dtype, device=self._device), lengths)

    def owned_part(self, unit: Unit, of: Sequence[Tensor]) -> Tensor:
        """The part of `of`, a tensor for each owned span, that belongs to the unit."""
        for owned, tensor in zip(self.owned, of, strict=True):
            if len(unit.owned.within(owned)):
                return tensor[unit.owned.slice_in(owned)]
        return torch.empty(0, dtype=self._dtype, device=self._device)

    def owned_parts(self, spans: Sequence[Span], of: Sequence[Tensor]) -> list[Tensor]:
        """The parts of `of`, a tensor for each owned span, that belong to the spans."""
        return [part.of(of) for part in owned_slices(self.owned, sorted(spans, key=lambda span: span.begin))]

    def refresh(self, unit: Unit) -> None:
        """Copy the master weights to the owned part of the unit's weights."""
        if self._has_master_copy:
            unit.owned_part(unit.weights).copy_(self.owned_part(unit, self.master))

    def clear_grads(self) -> None:
        """Set all gradients to zero."""
        for grads in self._all_grads:
            grads.zero_()

    def squared_norm(self) -> Tensor:
        """Sum of squares of the gradients that this rank counts, as an fp64 scalar; of its replica's, if they go apart.

        Norms of short rows, then their sum in fp64: an fp32 norm over 17 million gradients is off by 0.1%, and by a
        different 0.1% on every layout.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for part in self._counted:
            grads = part.of(self.grads)
            in_rows = len(grads) // NORM_ROW * NORM_ROW
            for rows in (grads[:in_rows].view(-1, NORM_ROW), grads[in_rows:].view(1, -1)):
                for some in pieces(rows, torch.float32):
                    total += torch.linalg.vector_norm(some, dim=1, dtype=torch.float32).double().square().sum()
        return total

    def zeros(self) -> int:
        """How many of the gradients that this rank counts are exactly zero."""
        return self._parameters - sum(nonzero(part.of(self.grads)) for part in self._counted)


def _memory(
    size: int, spans: Mapping[str, Span], dtype: torch.dtype, device: torch.device, *, transient: bool
) -> tuple[Tensor, tuple[Tensor, ...], UnitMemory]:
    """A tensor over all weights and its parts at the units' spans.

    Transient parts are tensors apart, which have no memory yet.
    """
    units = [(unit_kind(name), len(span)) for name, span in spans.items()]
    apart = UnitMemory(units if transient else [], dtype, device)
    everything = torch.zeros(0 if transient else size, dtype=dtype, device=device)
    return everything, apart.tensors or _cut(everything, list(spans.values())), apart


def _cut(tensor: Tensor, spans: Sequence[Span]) -> tuple[Tensor, ...]:
    return tuple(tensor[span.begin : span.end] for span in spans)


def nonzero(tensor: Tensor) -> int:
    """How many elements are not zero.

    On the CPU by their bits, through NumPy: PyTorch 2.13 takes 26 ms for 17 million, NumPy 4. A negative zero counts
    as not zero.
    """
    if tensor.is_cuda:
        return int(torch.count_nonzero(tensor))
    bits = torch.int32 if tensor.element_size() == 4 else torch.int16
    return int(np.count_nonzero(tensor.view(bits).numpy()))


def _move_to_main_grad(weight: Tensor) -> None:
    """Add the gradient that autograd computes, as it does for norms and small biases, to `main_grad`.

    Autograd calls this also for a matrix whose product has added to `main_grad` already.
    """
    assert isinstance(weight, Weight)
    if weight.grad is not None:
        weight.main_grad.add_(weight.grad)
        weight.grad = None
