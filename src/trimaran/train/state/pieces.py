"""Pieces: what a rank holds of the whole model's tensors, as boxes of their full shapes.

A rank keeps weights and optimizer state in flat buffers. A span of a flat buffer is a run of elements of a tensor in
C order: a part of a row, whole rows, a part of a row. Named by their offsets in the full tensor these boxes mean the
same on every layout, so that a checkpoint can be read on another layout than it was written on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from trimaran.train.comm.mesh import Mesh
from trimaran.train.engine.flat_weights import FlatWeights, Place
from trimaran.train.engine.trainer import Trainer
from trimaran.train.engine.units import Span, owned_slices

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Piece:
    """A box of the tensor `name` of the whole model, and the memory that holds it (contiguous, of the box's shape)."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The boxes (offsets, sizes) that elements `begin` .. `end` - 1 of a C-ordered array of `shape` make, in order.

    At most 2 n - 1 boxes for n dimensions.
    """
    if begin >= end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within a single row
        yield from _in_row(shape, begin, end)
        return
    yield from _in_row(shape, begin, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last * row, end)


def _in_row(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    row = math.prod(shape[1:])
    number = begin // row
    for offsets, sizes in boxes(shape[1:], begin - number * row, end - number * row):
        yield (number, *offsets), (1, *sizes)


def global_name(name: str, place: Place) -> str:
    """The name under which a weight is saved: the head's copy of a tied embedding is the embedding."""
    return (place.spec.drawn_as or name) if place.spec.tied_copy else name


def global_shape(place: Place) -> tuple[int, ...]:
    """A weight's full shape without the padding of the vocabulary, which differs with TP."""
    spec = place.spec
    return spec.shape if spec.real_rows is None else (spec.real_rows, *spec.shape[1:])


def pieces_of(flat: FlatWeights, spans: Iterable[Span], tensors: Sequence[Tensor], kind: str) -> Iterator[Piece]:
    """The pieces of all weights that lie in `spans`, which are parts of what this rank owns.

    `tensors` hold a value for every owned element (master weights, a moment), in a tensor for each span of
    `FlatWeights.owned`. `kind` begins each piece's name: `weights/layers.0.mlp.up.weight`.
    """
    slices = owned_slices(flat.owned, spans)
    for name, place in flat.places.items():
        shape, begin, holders = tuple(place.weight.shape), place.span.begin, place.holders
        without_padding = Span(begin, begin + _real_elements(place, shape))
        origin = [holders.dealt.index * shape[0], *(0 for _ in shape[1:])]
        if place.spec.shard_dim is not None:
            origin[place.spec.shard_dim] += holders.cut.index * shape[place.spec.shard_dim]
        for found in slices:
            first, tensor = flat.owned[found.index].begin, tensors[found.index]
            part = without_padding.within(Span(first + found.within.start, first + found.within.stop))
            at = part.begin - first
            for offsets, sizes in boxes(shape, part.begin - begin, part.end - begin):
                elements = math.prod(sizes)
                yield Piece(
                    f"{kind}/{global_name(name, place)}",
                    global_shape(place),
                    tuple(start + offset for start, offset in zip(origin, offsets, strict=True)),
                    tensor[at : at + elements].view(sizes),
                )
                at += elements


def state_pieces(trainer: Trainer, *, saving: bool) -> list[Piece]:
    """All that a checkpoint keeps of what this rank owns; `saving`: only what no other rank saves.

    Master weights and optimizer state; of replicas that train apart the weights from which their round began and the
    outer optimizer's state, once what is on its way is there. What replicas do not have in common is named after each,
    as in `replica1.exp_avg`.
    """
    flat, own = trainer.flat, dict[str, Sequence[Tensor]](trainer.sums.state)
    common: dict[str, Sequence[Tensor]] = {"weights": flat.master, **trainer.optimizer.state}
    if trainer.outer is not None:
        trainer.outer.settle()
        own |= common
        common = {"weights": trainer.outer.weights, **trainer.outer.state}
    own = {replicas_own(name, trainer.mesh): tensors for name, tensors in own.items()}
    return [
        piece
        for state, counted in ((common, flat.counted), (own, flat.counted_of_replica))
        for kind, tensors in state.items()
        for piece in pieces_of(flat, counted if saving else flat.owned, tensors, kind)
    ]


def replicas_own(name: str, mesh: Mesh) -> str:
    """The name of what this rank's replica keeps for itself."""
    return f"replica{mesh.holders['dense'].copies.index}.{name}"


def _real_elements(place: Place, shape: tuple[int, ...]) -> int:
    """How many elements of a rank's part of a weight, the first ones, are not padding."""
    rows, row = shape[0], math.prod(shape[1:])
    if place.spec.real_rows is None:
        return rows * row
    first = place.holders.cut.index * rows if place.spec.shard_dim == 0 else 0
    return max(0, min(place.spec.real_rows - first, rows)) * row
