"""Axes: the one table of parallel axes, and the only arithmetic of their sizes, strides, groups and coordinates.

A rank's number is its coordinates along the axes as the digits of a mixed radix: along the innermost axis of the
placement neighbours differ by 1, along the next by the size of the innermost, and so on. The same functions answer
for one Layout, whose degrees are ints, and for a LayoutGrid, whose degrees are arrays over layouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import permutations
from operator import mul
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

AxisName = Literal["tp", "pp", "dp"]
# Of one layout, or of each layout of a grid, shape (n,).
Size = TypeVar("Size", int, NDArray[np.int64])


@dataclass(frozen=True)
class Axis:
    """One axis. `name` is the field of a layout, the column and the word of the notation that hold its degree.

    `title` is how people write it. The notation always states the degree of a `usual` axis, of another one only a
    degree above 1. `largest` is the largest degree that a search proposes. `scale` is how far apart doubling the
    degree puts two layouts, in length scales of the error of the cost model.
    """

    name: AxisName
    title: str
    largest: Callable[[Workload, Stack], int] = lambda workload, stack: 1
    usual: bool = False
    scale: float = 0.5


# In the order in which people write them.
AXES: tuple[Axis, ...] = (
    Axis("dp", "DP", lambda workload, stack: workload.global_batch, True, 0.4),
    Axis("tp", "TP", lambda workload, stack: workload.model.heads if stack.tensor_parallel else 1, True, 0.7),
    Axis("pp", "PP", lambda workload, stack: workload.model.layers if stack.pipeline_parallel else 1, True, 0.5),
)
# A placement orders the axes from the innermost, whose neighbours are neighbouring ranks, to the outermost.
USUAL_PLACEMENT: tuple[AxisName, ...] = ("tp", "dp", "pp")

DEGREES: tuple[AxisName, ...] = tuple(axis.name for axis in AXES)
PRODUCT_IN_WORDS = " x ".join(axis.title for axis in AXES if axis.usual)
DEGREES_IN_WORDS = f"{', '.join(DEGREES[:-1])} and {DEGREES[-1]}"
PLACEMENTS: tuple[tuple[AxisName, ...], ...] = tuple(permutations(USUAL_PLACEMENT))
# Axes that are made of parts, the innermost first: replicas that hold the same, and those that share it out.
PARTS: Mapping[str, tuple[str, ...]] = {"dp": ("shard", "replicate")}
_WHOLE = {part: whole for whole, parts in PARTS.items() for part in parts}
# 1 where an axis lies inside another, else 0, by the placement's index.
INSIDE: Mapping[tuple[str, str], NDArray[np.int64]] = {
    (inner, outer): np.array([order.index(inner) < order.index(outer) for order in PLACEMENTS], dtype=np.int64)
    for inner, outer in permutations(USUAL_PLACEMENT, 2)
}


def product(sizes: Iterable[Any]) -> Any:
    """The product of one size or more."""
    return reduce(mul, sizes)


def devices_of(degrees: Mapping[str, Any], without: str = "") -> Any:
    """The product of all degrees, or of all but one axis', in a row's or candidates' fields by name."""
    return product(degrees[name] for name in DEGREES if name != without)


def in_words(degrees: Mapping[str, Any], without: str = "") -> str:
    """A product of degrees as people write it: `DP 8 x TP 4 x PP 12`, or all but one axis'."""
    stated = (axis for axis in AXES if (axis.usual or degrees[axis.name] != 1) and axis.name != without)
    return " x ".join(f"{axis.title} {degrees[axis.name]}" for axis in stated)


class Laid(ABC, Generic[Size]):
    """What a layout, or a grid of them, answers about its axes: by name (`tp`) or by name of a part (`shard`)."""

    @abstractmethod
    def lies_inside(self, inner: str, outer: str) -> Size:
        """1 where the placement has `inner` inside `outer`, else 0."""

    @abstractmethod
    def chose(self, choice: str, *words: object) -> Any:
        """Whether a choice is one of `words`; in a grid an array of truths over layouts."""

    @property
    def shard(self) -> Size:
        """Replicas that share out among them what ZeRO shards: all of them at any of its stages, else 1."""
        fields: Any = self
        sharded: Size = 1 + (fields.dp - 1) * (fields.zero_stage > 0)
        return sharded

    @property
    def replicate(self) -> Size:
        """Replicas that hold the same shards: DP over `shard`."""
        fields: Any = self
        copies: Size = fields.dp // self.shard
        return copies

    def fold(self, *axes: str) -> Size:
        """Ranks of a group along the axes together: the product of their sizes."""
        size: Size = product(getattr(self, axis) for axis in axes)
        return size

    @property
    def devices(self) -> Size:
        """Ranks used: the product of all degrees."""
        return self.fold(*DEGREES)

    def stride(self, axis: str) -> Size:
        """Distance in ranks between two neighbours of a group along the axis: the product of what lies inside it."""
        whole = _WHOLE.get(axis, axis)
        fields: Any = self
        inside: list[Any] = [
            1 + (getattr(fields, name) - 1) * self.lies_inside(name, whole) for name in DEGREES if name != whole
        ]
        finer: tuple[str, ...] = PARTS[whole][: PARTS[whole].index(axis)] if axis in _WHOLE else ()
        distance: Size = product([*inside, *(getattr(fields, part) for part in finer)])
        return distance

    def coordinate(self, axis: str, rank: int) -> Size:
        """Place of a rank among its group along the axis."""
        place: Size = rank // self.stride(axis) % self.fold(axis)
        return place


def groups(layout: Laid[int], *axes: str) -> list[tuple[int, ...]]:
    """All groups of ranks that differ along the axes (or parts of them) alone, each in order of rank."""
    finest = [part for name in DEGREES for part in PARTS.get(name, (name,))]
    along = {part for name in axes for part in PARTS.get(name, (name,))}
    others = [(layout.stride(part), layout.fold(part)) for part in finest if part not in along]
    together: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.devices):
        together.setdefault(tuple(rank // stride % size for stride, size in others), []).append(rank)
    return [tuple(ranks) for ranks in together.values()]
