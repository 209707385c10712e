"""Flat buffers: all weights of a rank in one tensor, all gradients in another.

One buffer makes the data-parallel sum, the gradient norm and the optimizer step a handful of
large operations instead of hundreds of small ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from trimaran.cluster import Precision
from trimaran.train.weight import Weight, WeightSpec, declared_weights, draw

COMPUTE_DTYPE: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16_pure": torch.bfloat16,
}

# Every weight starts on a cache line and every segment is a whole number of rows for the norm.
NORM_ROW = 1024


@dataclass(frozen=True)
class Segment:
    """A contiguous run of the buffers whose weights are treated alike."""

    begin: int
    end: int
    decays: bool
    counted: bool


@dataclass(frozen=True)
class Place:
    """Where one weight lies in the buffers."""

    weight: Weight
    spec: WeightSpec
    begin: int

    @property
    def end(self) -> int:
        """One past its last element."""
        return self.begin + self.weight.numel()


def padded(elements: int) -> int:
    """Elements rounded up to whole rows."""
    return -(-elements // NORM_ROW) * NORM_ROW


class FlatWeights:
    """Weights, gradients and (under bf16) fp32 master weights of one rank.

    * fp32: weights and gradients in fp32.
    * bf16: weights in bf16 for computing, master weights and summed gradients in fp32.
    * bf16_pure: everything in bf16.

    `segments` cover the buffers in order. `counted` is False where another rank holds the same
    weights and counts them in the gradient norm (TP ranks after the first for what TP repeats,
    and the second copy of a tied embedding).
    """

    def __init__(
        self, module: nn.Module, precision: Precision, seed: int, tp_rank: int, tp: int, device: torch.device
    ) -> None:
        declared = declared_weights(module)

        def kind(spec: WeightSpec) -> tuple[bool, bool]:
            return spec.decays, not spec.tied_copy and (spec.shard_dim is not None or tp_rank == 0)

        in_order = sorted(declared, key=lambda name: kind(declared[name][2]), reverse=True)
        begins, size = {}, 0
        for name in in_order:
            begins[name] = size
            elements = getattr(declared[name][0], declared[name][1]).numel()
            size += padded(elements)

        compute = COMPUTE_DTYPE[precision]
        self.weights = torch.zeros(size, dtype=compute, device=device)
        kept_in_fp32 = precision == "bf16"
        self.master = torch.zeros(size, device=device) if kept_in_fp32 else self.weights
        self.grads = torch.zeros(size, dtype=self.master.dtype, device=device)

        self.places: dict[str, Place] = {}
        self.segments: list[Segment] = []
        for name in in_order:
            owner, attribute, spec = declared[name]
            begin = begins[name]
            values = draw(spec, name, seed, tp_rank, tp)
            span = slice(begin, begin + values.numel())
            self.master[span] = values.reshape(-1).to(self.master.dtype)
            weight = Weight(self.weights[span].view(values.shape))
            weight.main_grad = self.grads[span].view(values.shape)
            weight.register_post_accumulate_grad_hook(_move_to_main_grad)  # type: ignore[no-untyped-call]
            setattr(owner, attribute, weight)
            self.places[name] = Place(weight, spec, begin)
            self._extend_segments(begin, begin + padded(values.numel()), *kind(spec))
        if kept_in_fp32:
            self.weights.copy_(self.master)

    def _extend_segments(self, begin: int, end: int, decays: bool, counted: bool) -> None:
        last = self.segments[-1] if self.segments else None
        if last and (last.decays, last.counted) == (decays, counted):
            self.segments[-1] = Segment(last.begin, end, decays, counted)
        else:
            self.segments.append(Segment(begin, end, decays, counted))

    @property
    def parameters(self) -> int:
        """Weights that this rank is the one to count."""
        return sum(p.weight.numel() for p in self.places.values() if self._counted(p.begin))

    def _counted(self, at: int) -> bool:
        return next(s.counted for s in self.segments if s.begin <= at < s.end)

    def squared_norm(self) -> Tensor:
        """Sum of squares of the gradients that this rank counts, as an fp64 scalar.

        Norms of short rows, then their sum in fp64: one fp32 norm over 17 million gradients is
        off by 0.1%, and by a different 0.1% on every layout.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.grads.device)
        for segment in self.segments:
            if segment.counted:
                rows = self.grads[segment.begin : segment.end].view(-1, NORM_ROW)
                total += torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).double().square().sum()
        return total

    def zeros(self) -> int:
        """How many of the gradients that this rank counts are exactly zero."""
        return self.parameters - sum(nonzero(self.grads[s.begin : s.end]) for s in self.segments if s.counted)


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
