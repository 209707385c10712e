"""Units: where each weight lies among all weights of a rank, which ranks hold it, and which part of it a rank owns.

A unit is a run of weights that are summed, gathered and freed together: a layer, a matrix over the vocabulary, a
norm. All of a unit's weights are held by the same ranks. Every unit is cut into equal shards, one for each rank that
shares the optimizer state, so that a collective over a unit is balanced and no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trimaran.train.comm.mesh import Holders, WeightKind
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
    weights and counts them in the gradient norm and writes them to checkpoints.
    """

    decays: bool
    counted: bool


@dataclass(frozen=True)
class HeldSpan:
    """The span of a unit, and the ranks that hold its weights."""

    span: Span
    holders: Holders

    @property
    def owned(self) -> Span:
        """The part whose master weights and optimizer state this rank holds.

        All of it, an equal share of it under ZeRO, and all or nothing under a parameter server.
        """
        if self.holders.serves and self.holders.copies.index > 0:
            return Span(self.span.begin, self.span.begin)
        return part_of(self.span, self.holders.sharers.index, self.holders.sharers.size)


@dataclass(frozen=True)
class WeightMap:
    """Where each weight begins, each unit's span in the order of a forward pass, and how spans are treated."""

    begins: Mapping[str, int]
    units: Mapping[str, HeldSpan]
    treatments: tuple[tuple[Span, Treatment], ...]

    @property
    def size(self) -> int:
        """Elements in all, padding included."""
        return max((unit.span.end for unit in self.units.values()), default=0)

    @property
    def owned(self) -> tuple[Span, ...]:
        """What this rank owns."""
        return merged(unit.owned for unit in self.units.values())

    def counted(self, *, of_replica: bool = False) -> tuple[Span, ...]:
        """What this rank counts in sums over all weights: every weight of the model is counted by one rank.

        Copies that own the same count an equal part of it each; `of_replica`: all of it, so that every weight is
        counted by one rank of each replica.
        """
        shares: list[Span] = []
        for holders in {id(unit.holders): unit.holders for unit in self.units.values()}.values():
            part, parts = (0, 1) if holders.serves or of_replica else (holders.copies.index, holders.copies.size)
            owned = merged(unit.owned for unit in self.units.values() if unit.holders is holders)
            shares += [part_of(span, part, parts) for span in owned]
        counted = merged(span for span, treatment in self.treatments if treatment.counted)
        return merged(sorted((a.within(b) for a in counted for b in shares), key=lambda span: span.begin))


def unit_name(name: str, spec: WeightSpec) -> str:
    """The unit of the weight `name`: its layer, its top-level module, or itself; of the layer, weights of one kind.

    A matrix over the vocabulary is a unit by itself. Where two stages hold a tied matrix, its shards are then the
    same rows on both, and the owners of a shard add up that shard alone.
    """
    parts = name.split(".")
    if spec.real_rows is not None:
        return name
    kind = () if spec.kind == "dense" else (spec.kind,)
    return ".".join((*(parts[:2] if parts[0] == "layers" else parts[:1]), *kind))


def unit_kind(unit: str) -> str:
    """The name of a unit without a layer's number."""
    return ".".join(part for part in unit.split(".") if not part.isdigit())


def padded(elements: int, multiple: int) -> int:
    """Elements rounded up to whole multiples."""
    return -(-elements // multiple) * multiple


def part_of(span: Span, index: int, parts: int) -> Span:
    """One of the equal parts of a span; where it cannot be cut evenly, some are longer by one element."""
    return Span(span.begin + len(span) * index // parts, span.begin + len(span) * (index + 1) // parts)


def map_weights(
    sizes: Mapping[str, int],
    specs: Mapping[str, WeightSpec],
    holders_of: Mapping[WeightKind, Holders],
    line: int = LINE,
) -> WeightMap:
    """Lay the weights out in units. `sizes` are elements of the TP-local weights, in the order of the modules.

    Weights and shards begin at multiples of `line` from where their unit does.
    """

    def treatment(name: str) -> Treatment:
        spec = specs[name]
        is_whole = spec.shard_dim is None
        return Treatment(spec.decays, not spec.tied_copy and not (is_whole and holders_of[spec.kind].cut.index))

    members: dict[str, list[str]] = {}
    for name in sizes:
        members.setdefault(unit_name(name, specs[name]), []).append(name)
    begins: dict[str, int] = {}
    units: dict[str, HeldSpan] = {}
    treatments, at = list[tuple[Span, Treatment]](), 0
    for unit, names in members.items():
        first, holders = at, holders_of[specs[names[0]].kind]
        # in the same order on all TP ranks, so that weights which all of them hold lie in the same shard on each
        for name in sorted(names, key=lambda n: (specs[n].decays, specs[n].shard_dim is not None), reverse=True):
            begins[name] = at
            end = at + padded(sizes[name], line)
            treatments.append((Span(at, end), treatment(name)))
            at = end
        at = first + padded(at - first, line * holders.sharers.size)
        # padding is zero and stays zero under any treatment
        treatments[-1] = (Span(treatments[-1][0].begin, at), treatments[-1][1])
        units[unit] = HeldSpan(Span(first, at), holders)
    return WeightMap(begins, units, tuple(treatments))


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
