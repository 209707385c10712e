"""Sums of gradients as products of thin matrices: PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2).

Of a weight's gradient M, (n, m), and its factor Q, (m, LOW_RANK), which all ranks have alike, ranks sum M Q, make its
columns orthonormal, P, and sum M^T P, which is the next step's Q: what all of them take for the sum of M is P Q^T. What
a rank's own M has besides stays there and is added to what it sends the next time. Biases, norms and matrices that are
thin themselves are summed exactly, together with M Q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.layout.compression import LOW_RANK, in_factors
from trimaran.train.comm.exchange import Finish
from trimaran.train.comm.group import Group
from trimaran.train.engine.copy_sums import FeedbackSums
from trimaran.train.engine.flat_weights import FlatWeights, Unit
from trimaran.train.engine.units import Span
from trimaran.train.model.weight import generator_of


@dataclass
class Factored:
    """A matrix of a unit: where it lies there, its rows and columns, and its factor of the step before."""

    name: str
    span: Span
    rows: int
    columns: int
    factor: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """The matrix, a view of the unit's flat `tensor`."""
        return tensor[self.span.begin : self.span.end].view(self.rows, self.columns)

    def draw(self) -> None:
        """A first factor, the same on every rank."""
        self.factor.copy_(torch.randn(self.columns, LOW_RANK, generator=generator_of(0, f"factor of {self.name}")))


class LowRankSums(FeedbackSums):
    """Sums by factors. A training that goes on from a checkpoint begins with factors that are drawn anew."""

    def __init__(self, flat: FlatWeights) -> None:
        super().__init__(flat)
        self._factored = {unit: _matrices(flat, unit) for unit in flat.units}

    def begin(self, unit: Unit, tensor: Tensor) -> Finish:
        """Begin to sum `tensor` and what was not sent before."""
        return begin_low_rank_sum(unit.holders.copies, tensor, self.error_of(unit), self._factored[unit])

    def forget(self) -> None:
        """Forget what was not sent, and factors of numbers that were not finite."""
        super().forget()
        for matrices in self._factored.values():
            for matrix in matrices:
                matrix.draw()


def begin_low_rank_sum(group: Group, tensor: Tensor, error: Tensor, matrices: list[Factored]) -> Finish:
    """Begin to sum the group's `tensor` + `error`, both flat and of equal length, into `tensor`.

    Once it is finished, the sum over ranks of `tensor` + `error` that went in equals `tensor` plus the sum over ranks
    of `error` that came out, but for fp32's rounding.
    """
    error.add_(tensor)
    between = _between(matrices, len(tensor))
    sent = torch.cat([
        *((matrix.of(error) @ matrix.factor).view(-1) for matrix in matrices),
        *(error[span.begin : span.end] for span in between),
    ])  # fmt: skip
    finish_sum = group.begin_all_reduce(sent)

    def finish() -> None:
        finish_sum()
        lefts, exact = _cut(sent, [matrix.rows * LOW_RANK for matrix in matrices])
        axes = [torch.linalg.qr(left.view(-1, LOW_RANK)).Q for left in lefts]
        mine = [matrix.of(error).T @ axis for matrix, axis in zip(matrices, axes, strict=True)]
        rights = torch.cat([own.reshape(-1) for own in mine]) if mine else sent.new_empty(0)
        group.all_reduce(rights)
        for matrix, axis, own, right in zip(
            matrices, axes, mine, _cut(rights, [len(own) * LOW_RANK for own in mine])[0], strict=True
        ):
            matrix.factor.copy_(right.view(-1, LOW_RANK))
            matrix.of(error).addmm_(axis, own.T, alpha=-1.0)
            torch.mm(axis, matrix.factor.T, out=matrix.of(tensor))
        for span, part in zip(between, torch.split(exact, [len(span) for span in between]), strict=True):
            tensor[span.begin : span.end] = part
            error[span.begin : span.end] = 0.0

    return finish


def _matrices(flat: FlatWeights, unit: Unit) -> list[Factored]:
    """The unit's matrices that are sent in factors."""
    found = []
    for name, place in sorted(flat.places.items(), key=lambda item: item[1].span.begin):
        shape = place.weight.shape
        rows, columns = shape[:-1].numel(), shape[-1]
        if len(place.span.within(unit.span)) and len(shape) > 1 and in_factors(rows, columns):
            at = place.span.begin - unit.span.begin
            factor = unit.weights.new_empty(columns, LOW_RANK, dtype=torch.float32)
            matrix = Factored(name, Span(at, at + rows * columns), rows, columns, factor)
            matrix.draw()
            found.append(matrix)
    return found


def _between(matrices: list[Factored], size: int) -> list[Span]:
    """What of a unit's numbers is in no matrix."""
    ends = [0, *(matrix.span.end for matrix in matrices)]
    begins = [*(matrix.span.begin for matrix in matrices), size]
    return [Span(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]


def _cut(tensor: Tensor, lengths: list[int]) -> tuple[list[Tensor], Tensor]:
    """The pieces of so many numbers, and what is left."""
    *pieces, rest = torch.split(tensor, [*lengths, len(tensor) - sum(lengths)])
    return pieces, rest
