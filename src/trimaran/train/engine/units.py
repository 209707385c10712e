"""Units: where each weight lies among all weights of a rank, and which part a data-parallel rank owns.

A unit is a run of weights that are summed, gathered and freed together: a layer, a matrix over the vocabulary, a
norm. Every unit is cut into equal shards, one for each rank that shares the optimizer state, so that a collective
over a unit is balanced and no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trimaran.layout.layout import Layout
from trimaran.train.model.weight import WeightSpec

# Weights and shards begin on a cache line, whatever their element size.
LINE = 64


@dataclass(frozen=True)
class Span:
    """Elements `begin` to `end` - 1 in a rank's flat coordinates, which run over all its TP-local weights."""

    begin: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.begin)

    def within(self, other: Span) -> Span:
        """The part that also lies in `other`; empty where there is none."""
        begin = max(self.begin, other.begin)
        return Span(begin, max(begin, min(self.end, other.end)))

    def slice_in(self, other: Span) -> slice:
        """Where this span, which lies within `other`, is in a tensor that holds `other` alone."""
        return slice(self.begin - other.begin, self.end - other.begin)


@dataclass(frozen=True)
class Treatment:
    """How the weights of a span are treated.

    `decays` says whether weight decay applies. `counted` is False where another TP rank or stage holds the same
    weights and counts them in the gradient norm.
    """

    decays: bool
    counted: bool


@dataclass(frozen=True)
class WeightMap:
    """Where each weight begins, each unit's span in the order of a forward pass, and how spans are treated."""

    begins: Mapping[str, int]
    units: Mapping[str, Span]
    treatments: tuple[tuple[Span, Treatment], ...]

    @property
    def size(self) -> int:
        """Elements in all, padding included."""
        return max((span.end for span in self.units.values()), default=0)


def unit_name(name: str, spec: WeightSpec) -> str:
    """The unit of the weight `name`: its layer, its top-level module, or itself.

    A matrix over the vocabulary is a unit by itself. Where two stages hold a tied matrix, its shards are then the
    same rows on both, and the owners of a shard add up that shard alone.
    """
    parts = name.split(".")
    if spec.real_rows is not None:
        return name
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def padded(elements: int, multiple: int) -> int:
    """Elements rounded up to whole multiples."""
    return -(-elements // multiple) * multiple


def map_weights(sizes: Mapping[str, int], specs: Mapping[str, WeightSpec], tp_rank: int, shards: int) -> WeightMap:
    """Lay the weights out in units. `sizes` are elements of the TP-local weights, in the order of the modules."""

    def treatment(name: str) -> Treatment:
        spec = specs[name]
        return Treatment(spec.decays, not spec.tied_copy and (spec.shard_dim is not None or tp_rank == 0))

    members: dict[str, list[str]] = {}
    for name in sizes:
        members.setdefault(unit_name(name, specs[name]), []).append(name)
    begins: dict[str, int] = {}
    units: dict[str, Span] = {}
    treatments, at = list[tuple[Span, Treatment]](), 0
    for unit, names in members.items():
        first = at
        # in the same order on all TP ranks, so that weights which all of them hold lie in the same shard on each
        for name in sorted(names, key=lambda n: (specs[n].decays, specs[n].shard_dim is not None), reverse=True):
            begins[name] = at
            end = at + padded(sizes[name], LINE)
            treatments.append((Span(at, end), treatment(name)))
            at = end
        at = first + padded(at - first, LINE * shards)
        # padding is zero and stays zero under any treatment
        treatments[-1] = (Span(treatments[-1][0].begin, at), treatments[-1][1])
        units[unit] = Span(first, at)
    return WeightMap(begins, units, tuple(treatments))


def owned_span(unit: Span, layout: Layout, dp_rank: int) -> Span:
    """The part of a unit whose master weights and optimizer state the data-parallel rank holds.

    All of it, an equal share of it under ZeRO, and all or nothing under a parameter server.
    """
    if layout.dp_kind == "parameter_server":
        return unit if dp_rank == 0 else Span(unit.begin, unit.begin)
    if layout.zero_stage == 0:
        return unit
    share = len(unit) // layout.dp
    return Span(unit.begin + dp_rank * share, unit.begin + (dp_rank + 1) * share)


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans, which are in order, with neighbours joined and empty spans left out."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].end == span.begin:
            joined[-1] = Span(joined[-1].begin, span.end)
        elif len(span):
            joined.append(span)
    return tuple(joined)


@dataclass(frozen=True)
class OwnedSlice:
    """A part of an owned span: of the one at `index`, the elements `within`."""

    index: int
    within: slice

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The part of `tensors`, which hold something of each owned span."""
        return tensors[self.index][self.within]


def owned_slices(owned_spans: Sequence[Span], wanted: Iterable[Span]) -> tuple[OwnedSlice, ...]:
    """The parts of the owned spans that the wanted spans, in order, cover."""
    joined = merged(wanted)
    return tuple(
        OwnedSlice(index, span.within(owned).slice_in(owned))
        for index, owned in enumerate(owned_spans)
        for span in joined
        if len(span.within(owned))
    )
