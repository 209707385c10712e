"""Axes: the one table of parallel axes, and the only arithmetic of their sizes, strides, groups and coordinates.

A rank's number is its coordinates along the axes as the digits of a mixed radix: along the innermost axis of the
placement neighbours differ by 1, along the next by the size of the innermost, and so on. Experts see the devices of a
stage as edp x ep x etp in place of dp x cp x tp (Megatron-Core 0.15, core/parallel_state.py, lines 732 to 763): their
axes are laid over the same ranks, `etp` innermost. The same functions answer for one Layout, whose degrees are ints,
and for a LayoutGrid, whose degrees are arrays over layouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, permutations
from operator import mul
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

AxisName = Literal["tp", "cp", "pp", "dp"]
# Of one layout, or of each layout of a grid, shape (n,).
Size = TypeVar("Size", int, NDArray[np.int64])


@dataclass(frozen=True)
class Axis:
    """One axis. `name` is the field of a layout, the column and the word of the notation that hold its degree.

    `title` is how people write it. The notation always states the degree of a `usual` axis, of another one only a
    degree above 1. `largest` is the largest degree that a search proposes, of those that are `worth` it. `scale` is
    how far apart doubling the degree puts two layouts, in length scales of the error of the cost model.
    """

    name: AxisName
    title: str
    largest: Callable[[Workload, Stack], int] = lambda workload, stack: 1
    usual: bool = False
    scale: float = 0.5
    worth: Callable[[Workload, int], bool] = lambda workload, degree: True


# Tokens of a sequence that a rank has at least where a search shares it out: fewer make its products small and its
# exchanges many. A sequence so short lies on one rank.
LEAST_TOKENS = 4096

# In the order in which people write them.
AXES: tuple[Axis, ...] = (
    Axis("dp", "DP", lambda workload, stack: workload.global_batch, True, 0.4),
    Axis("tp", "TP", lambda workload, stack: workload.model.heads if stack.tensor_parallel else 1, True, 0.7),
    Axis(
        "cp",
        "CP",
        lambda workload, stack: workload.seq_len // LEAST_TOKENS if stack.context_parallel else 1,
        worth=lambda workload, degree: workload.seq_len % degree == 0,
    ),
    Axis("pp", "PP", lambda workload, stack: workload.model.layers if stack.pipeline_parallel else 1, True, 0.5),
)
# A placement orders the axes from the innermost, whose neighbours are neighbouring ranks, to the outermost.
# Megatron-Core's order (0.15, core/parallel_state.py, line 527: tp-cp-ep-dp-pp), torchtitan's, too.
USUAL_PLACEMENT: tuple[AxisName, ...] = ("tp", "cp", "dp", "pp")

DEGREES: tuple[AxisName, ...] = tuple(axis.name for axis in AXES)
PRODUCT_IN_WORDS = " x ".join(axis.title for axis in AXES if axis.usual)
DEGREES_IN_WORDS = f"{', '.join(DEGREES[:-1])} and {DEGREES[-1]}"
_USUAL = frozenset(axis.name for axis in AXES if axis.usual)


def full_placement(stated: tuple[Any, ...]) -> tuple[Any, ...]:
    """The placement that states all axes: those that need not be named stand next to the usual one inside of them."""
    placed = list(stated)
    for inner, name in pairwise(USUAL_PLACEMENT):
        if name not in placed and inner in placed and name not in _USUAL:
            placed.insert(placed.index(inner) + 1, name)
    return tuple(placed)


def usual_axes(placement: tuple[Any, ...]) -> tuple[Any, ...]:
    """The usual axes of a placement, in its order."""
    return tuple(axis for axis in placement if axis in _USUAL)


def stated_placement(placement: tuple[Any, ...]) -> tuple[Any, ...]:
    """The axes that a placement has to name: the usual ones where the others stand where `full_placement` has them."""
    usual = usual_axes(placement)
    return usual if full_placement(usual) == placement else placement


def places_so(stack: Stack, placement: tuple[Any, ...]) -> bool:
    """Whether a stack lays out ranks in the order of a placement."""
    return not stack.placements or "-".join(stated_placement(placement)) in stack.placements


# The orders of the usual axes come first, so that they stand for all that axes of size 1 make of them.
PLACEMENTS: tuple[tuple[AxisName, ...], ...] = tuple(
    sorted(permutations(USUAL_PLACEMENT), key=lambda order: len(stated_placement(order)))
)
# A search orders the usual axes alone: all software has ranks that share a sequence next to those that share weights.
PROPOSED_PLACEMENTS = tuple(order for order in PLACEMENTS if len(stated_placement(order)) == len(_USUAL))
# Axes that are made of parts, the innermost first: replicas that hold the same, and those that share it out.
PARTS: Mapping[str, tuple[str, ...]] = {"dp": ("shard", "replicate"), "edp": ("eshard", "ereplicate")}
_WHOLE = {part: whole for whole, parts in PARTS.items() for part in parts}
# Axes of the experts over the ranks of one stage, the innermost first; `edp` is what the others leave.
EXPERT_AXES: tuple[str, ...] = ("etp", "ep", "edp")
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

    def size(self, axis: str) -> Size:
        """Ranks along an axis, along a part of one, or along an axis of the experts."""
        ranks: Size = _SIZES[axis](self) if axis in _SIZES else getattr(self, axis)
        return ranks

    def fold(self, *axes: str) -> Size:
        """Ranks of a group along the axes together: the product of their sizes."""
        size: Size = product(self.size(axis) for axis in axes)
        return size

    @property
    def devices(self) -> Size:
        """Ranks used: the product of all degrees."""
        return self.fold(*DEGREES)

    def stride(self, axis: str) -> Size:
        """Distance in ranks between two neighbours of a group along the axis: the product of what lies inside it."""
        whole: str = _WHOLE.get(axis, axis)
        if whole in EXPERT_AXES:
            return self._expert_stride(axis)
        fields: Any = self
        inside: list[Any] = [
            1 + (getattr(fields, name) - 1) * self.lies_inside(name, whole) for name in DEGREES if name != whole
        ]
        finer: tuple[str, ...] = PARTS[whole][: PARTS[whole].index(axis)] if axis in _WHOLE else ()
        distance: Size = product([*inside, *(self.size(part) for part in finer)])
        return distance

    def coordinate(self, axis: str, rank: int) -> Size:
        """Place of a rank among its group along the axis."""
        if _WHOLE.get(axis, axis) in EXPERT_AXES:
            among: Size = self._place_in_stage(rank) // self.places_apart(axis) % self.size(axis)
            return among
        place: Size = rank // self.stride(axis) % self.fold(axis)
        return place

    def _expert_stride(self, axis: str) -> Size:
        """The same along an axis of the experts, where stages lie between its ranks: to the first neighbour."""
        stages: Any = self.stride("pp")
        steps: Any = self.places_apart(axis)
        distance: Size = steps * (1 + (self.size("pp") - 1) * (steps >= stages))
        return distance

    def places_apart(self, axis: str) -> Size:
        """Distance between neighbours along an axis of the experts, counted in ranks of their stage alone."""
        whole: str = _WHOLE.get(axis, axis)
        finer: tuple[str, ...] = PARTS[whole][: PARTS[whole].index(axis)] if axis in _WHOLE else ()
        others: tuple[str, ...] = (*EXPERT_AXES[: EXPERT_AXES.index(whole)], *finer)
        steps: Size = product([1, *(self.size(other) for other in others)])
        return steps

    def stage_places(self, per_node: Any) -> Any:
        """Ranks of one stage that share a node of so many ranks: other stages lie between runs of `stride("pp")`."""
        run: Any = self.stride("pp")
        runs = np.maximum(per_node // (run * self.size("pp")), 1)
        return np.where(run < per_node, run * runs, per_node)

    def _place_in_stage(self, rank: int) -> Size:
        """Place of a rank among those of its stage, in order of rank."""
        stages: Any = self.stride("pp")
        place: Size = rank // (stages * self.size("pp")) * stages + rank % stages
        return place


def _shard(laid: Any) -> Any:
    """Replicas that share out what ZeRO shards: as stated, or all of them at any of its stages, else 1."""
    usual = 1 + (laid.dp - 1) * (laid.zero_stage > 0)
    return laid.shard + (laid.shard == 0) * usual


def _etp(laid: Any) -> Any:
    """Ranks that share an expert's weights: as stated, or as many as share the other weights."""
    return laid.etp + (laid.etp == 0) * laid.tp


def _edp(laid: Any) -> Any:
    """Ranks of a stage that hold the same experts."""
    return laid.dp * laid.cp * laid.tp // (laid.ep * _etp(laid))


def _eshard(laid: Any) -> Any:
    """Those of them that share out what ZeRO shards: as large a part as of the replicas, or one that divides them."""
    ranks = _edp(laid)
    among = np.gcd(ranks, np.maximum(ranks * _shard(laid) // laid.dp, 1))
    return 1 + (among - 1) * (laid.zero_stage > 0)


# Sizes that are no field of a layout: what a degree that is not stated (0) is, and what other degrees leave.
_SIZES: Mapping[str, Callable[[Any], Any]] = {
    "shard": _shard,
    "replicate": lambda laid: laid.dp // _shard(laid),
    "etp": _etp,
    "edp": _edp,
    "eshard": _eshard,
    "ereplicate": lambda laid: _edp(laid) // _eshard(laid),
}


def groups(layout: Laid[int], *axes: str) -> list[tuple[int, ...]]:
    """All groups of ranks that differ along the axes (or parts of them) alone, each in order of rank.

    Axes of the experts stand with `pp` and with each other alone: they are laid over the others.
    """
    finest = [part for name in DEGREES for part in PARTS.get(name, (name,))]
    if {_WHOLE.get(name, name) for name in axes} & set(EXPERT_AXES):
        finest = [part for name in (*EXPERT_AXES, "pp") for part in PARTS.get(name, (name,))]
    along = {part for name in axes for part in PARTS.get(name, (name,))}
    others = [part for part in finest if part not in along]
    together: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.devices):
        together.setdefault(tuple(layout.coordinate(part, rank) for part in others), []).append(rank)
    return [tuple(ranks) for ranks in together.values()]
