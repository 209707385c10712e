"""How ranks that own the same weights sum what each of them has of them: exactly, or in few bytes with error feedback.

A compressed sum is a reduce-scatter and an all-gather, as a ring's is. Each rank sends each other one its part of the
numbers, in a narrow format; that one adds up in fp32 what it is sent, and sends the sum to all in the same format. So
all ranks end with the same bits. What either rounding loses stays on the rank that rounded and is added to what it
sends the next time (Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847): over time nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from trimaran.layout.compression import BLOCK, SCALE_BYTES, Format
from trimaran.train.comm.exchange import Finish, done
from trimaran.train.comm.group import Group
from trimaran.train.engine.flat_weights import FlatWeights, Unit

_DTYPES = {1: torch.int8, 2: torch.float16}


class CopySums:
    """Sums over the copies of a unit, in place. `state` is what a rank has to keep between them, by name."""

    state: Mapping[str, tuple[Tensor, ...]] = {}

    def begin(self, unit: Unit, tensor: Tensor) -> Finish:
        """Begin to sum `tensor`, which is as long as what this rank owns of the unit."""
        return unit.holders.copies.begin_all_reduce(tensor)

    def forget(self) -> None:
        """Forget what was not sent, after a step that is to teach nothing."""


class NoSums(CopySums):
    """Copies go apart: nothing is summed."""

    def begin(self, unit: Unit, tensor: Tensor) -> Finish:
        """Leave `tensor` as it is."""
        del unit, tensor
        return done


class FeedbackSums(CopySums):
    """Sums that are not exact. `state["error"]` is what this rank has not sent yet."""

    def __init__(self, flat: FlatWeights) -> None:
        self._flat = flat
        self.state = {"error": flat.zeros_like_owned()}

    def error_of(self, unit: Unit) -> Tensor:
        """What has not been sent of the part of the unit that this rank owns."""
        return self._flat.owned_part(unit, self.state["error"])

    def forget(self) -> None:
        """Forget what was not sent."""
        for error in self.state["error"]:
            error.zero_()


class CompressedSums(FeedbackSums):
    """Sums in a narrow format."""

    def __init__(self, flat: FlatWeights, sent_as: Format) -> None:
        super().__init__(flat)
        self._format = sent_as

    def begin(self, unit: Unit, tensor: Tensor) -> Finish:
        """Begin to sum `tensor` and what was not sent before."""
        return begin_compressed_sum(unit.holders.copies, tensor, self.error_of(unit), self._format)


def begin_compressed_sum(group: Group, tensor: Tensor, error: Tensor, sent_as: Format) -> Finish:
    """Begin to sum the group's `tensor` + `error`, both flat and of equal length, into `tensor`.

    Once it is finished, the sum over ranks of `tensor` + `error` that went in equals `tensor` plus the sum over ranks
    of `error` that came out, but for fp32's rounding.
    """
    error.add_(tensor)
    part = -(-len(error) // (group.size * BLOCK)) * BLOCK
    owed = functional.pad(error, (0, group.size * part - len(error))).view(group.size, part)
    payload = pack(owed, sent_as)
    owed -= unpack(payload, sent_as)
    error.copy_(owed.view(-1)[: len(error)])
    arrived, finish_exchange = group.begin_all_to_all(payload)
    summed_here = error[group.index * part : (group.index + 1) * part]

    def finish() -> None:
        finish_exchange()
        total = unpack(arrived, sent_as).sum(0, keepdim=True)
        packed = pack(total, sent_as)
        summed_here.add_((total - unpack(packed, sent_as)).view(-1)[: len(summed_here)])
        everything = packed.new_empty(group.size, packed.shape[1])
        group.all_gather_into(everything, packed)
        tensor.copy_(unpack(everything, sent_as).view(-1)[: len(tensor)])

    return finish


def pack(rows: Tensor, sent_as: Format) -> Tensor:
    """(n, whole blocks) in fp32 -> (n, bytes): each row's scales, and then its numbers over them."""
    blocks = rows.view(len(rows), -1, BLOCK)
    scales = blocks.abs().amax(dim=2) / sent_as.largest
    # a block of zeros has any scale
    numbers = blocks / torch.where(scales == 0, 1.0, scales).unsqueeze(2)
    if not _DTYPES[sent_as.bytes].is_floating_point:
        numbers.round_()
    numbers = numbers.view(len(rows), -1).to(_DTYPES[sent_as.bytes])
    return torch.cat((scales.view(torch.uint8), numbers.view(torch.uint8)), dim=1)


def unpack(packed: Tensor, sent_as: Format) -> Tensor:
    """(n, bytes) of `pack` -> (n, whole blocks) in fp32."""
    blocks = packed.shape[1] // (SCALE_BYTES + BLOCK * sent_as.bytes)
    scales = packed[:, : SCALE_BYTES * blocks].contiguous().view(torch.float32)
    numbers = packed[:, SCALE_BYTES * blocks :].contiguous().view(_DTYPES[sent_as.bytes])
    values = numbers.to(torch.float32).view(len(packed), blocks, BLOCK)
    values *= scales.unsqueeze(2)
    return values.view(len(packed), -1)
