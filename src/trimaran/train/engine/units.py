"""Units: where each weight lies among all of a rank, and which part of them a data-parallel rank owns.

A unit is a run of weights that are summed, gathered and freed together: a layer, a matrix over the
vocabulary, a norm. Every unit is cut into equal shards, one for each rank that shares the state, so that
one collective over a unit is balanced and no rank waits for another's share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trimaran.layout.layout import Layout
from trimaran.train.model.weight import WeightSpec

# Weights and shards begin on a cache line, whatever their element size.
LINE = 64


@dataclass(frozen=True)
class Span:
    """Elements `begin` to `end` in a rank's flat coordinates, which run over all its TP-local weights."""

    begin: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.begin)

    def within(self, other: Span) -> Span:
        """The part that lies in `other` too; empty where there is none."""
        begin = max(self.begin, other.begin)
        return Span(begin, max(begin, min(self.end, other.end)))

    def slice_in(self, other: Span) -> slice:
        """Where this span, which lies in `other`, is in a tensor that holds `other` alone."""
        return slice(self.begin - other.begin, self.end - other.begin)


@dataclass(frozen=True)
class Kind:
    """How the weights of a run are treated.

    `counted` is False where another TP rank or stage holds the same weights and counts them in the
    gradient norm.
    """

    decays: bool
    counted: bool


@dataclass(frozen=True)
class Extent:
    """A unit's name and its place."""

    name: str
    span: Span


@dataclass(frozen=True)
class Plan:
    """The place of every weight, the units in the order in which a forward pass meets them, and their kinds."""

    begins: Mapping[str, int]
    extents: tuple[Extent, ...]
    kinds: tuple[tuple[Span, Kind], ...]

    @property
    def size(self) -> int:
        """Elements in all, padding included."""
        return self.extents[-1].span.end if self.extents else 0


def unit_name(name: str, spec: WeightSpec) -> str:
    """The unit of the weight `name`: its layer, its top-level module, or itself.

    A matrix over the vocabulary is a unit of its own. Where two stages hold a tied one, its shards are then
    the same rows on both, and what their owners add up is their shards alone.
    """
    parts = name.split(".")
    if spec.real_rows is not None:
        return name
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def padded(elements: int, multiple: int) -> int:
    """Elements rounded up to whole multiples."""
    return -(-elements // multiple) * multiple


def plan_units(sizes: Mapping[str, int], specs: Mapping[str, WeightSpec], tp_rank: int, shards: int) -> Plan:
    """Lay the weights out. `sizes` are elements of the TP-local weights, in the order of the modules."""

    def kind(name: str) -> Kind:
        spec = specs[name]
        return Kind(spec.decays, not spec.tied_copy and (spec.shard_dim is not None or tp_rank == 0))

    members: dict[str, list[str]] = {}
    for name in sizes:
        members.setdefault(unit_name(name, specs[name]), []).append(name)
    begins: dict[str, int] = {}
    extents, kinds, at = [], list[tuple[Span, Kind]](), 0
    for unit, names in members.items():
        first = at
        # in one order on all TP ranks, so that what they repeat lies in the same shard on each of them
        for name in sorted(names, key=lambda n: (specs[n].decays, specs[n].shard_dim is not None), reverse=True):
            begins[name] = at
            end = at + padded(sizes[name], LINE)
            kinds.append((Span(at, end), kind(name)))
            at = end
        at = first + padded(at - first, LINE * shards)
        # padding is zero and stays so: any kind will do
        kinds[-1] = (Span(kinds[-1][0].begin, at), kinds[-1][1])
        extents.append(Extent(unit, Span(first, at)))
    return Plan(begins, tuple(extents), tuple(kinds))


def own_span(unit: Span, layout: Layout, dp_rank: int) -> Span:
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
    """The spans, which are in order, with neighbours joined and empty ones left out."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].end == span.begin:
            joined[-1] = Span(joined[-1].begin, span.end)
        elif len(span):
            joined.append(span)
    return tuple(joined)


@dataclass(frozen=True)
class Run:
    """A part of one owned span: `held` says which, `within` where in it."""

    held: int
    within: slice


def runs(owned: Sequence[Span], wanted: Iterable[Span]) -> tuple[Run, ...]:
    """The parts of the owned spans that the wanted ones, in order, cover."""
    joined = merged(wanted)
    return tuple(
        Run(index, span.within(holder).slice_in(holder))
        for index, holder in enumerate(owned)
        for span in joined
        if len(span.within(holder))
    )
