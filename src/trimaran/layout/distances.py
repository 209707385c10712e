"""How far apart a choice's values lie in the surrogate's space, in length scales of the cost model's error."""

from __future__ import annotations

import math
from typing import Any

from trimaran.layout.axes import USUAL_PLACEMENT, stated_placement, usual_axes
from trimaran.layout.choice import Coordinates
from trimaran.nouns.recompute import MODULES, WHOLE, modules_of

# Doubling a degree changes what the cost model may have wrong; so does every other choice. One unit is one length scale
# of the surrogate. Layouts that differ in anything are apart: equal ones would be known once one of them is measured.
SWITCH, SMALL_SWITCH = 1.0, 0.3


def doublings(scale: float) -> Coordinates:
    """Doubling the number is `scale` length scales."""
    return lambda number: (scale * math.log2(number),)


def steps(size: float, values: tuple[Any, ...]) -> Coordinates:
    """Each value is `size` length scales from the next."""
    return lambda value: (size * values.index(value),)


def switches(size: float, values: tuple[Any, ...]) -> Coordinates:
    """Each of the values is a switch of its own."""
    return lambda value: tuple(size * (value == each) for each in values)


def recomputed(word: str) -> tuple[float, ...]:
    """None, selective and full a switch apart; named modules lie by selective, each a small switch from the others."""
    named = modules_of(word)
    place = 1 if named else WHOLE.index(word)
    return (SWITCH * place, *(SMALL_SWITCH * (module in named) for module in MODULES))


def unevenness(split: tuple[int, ...]) -> tuple[float, ...]:
    """Layers that the fullest stage has more than the leanest; 0 where the split is left to the stack."""
    return (SMALL_SWITCH * (max(split) - min(split)) if split else 0.0,)


def unlikeness(batches: tuple[int, ...]) -> tuple[float, ...]:
    """How often the most micro-batches of a replica double the fewest; 0 where all take as many."""
    return (SMALL_SWITCH * math.log2(max(batches) / min(batches)) if batches else 0.0,)


def places(placement: tuple[str, ...]) -> tuple[float, ...]:
    """A small switch for each usual axis that is not at its usual place, and one where another axis is not at its."""
    order = zip(usual_axes(placement), usual_axes(USUAL_PLACEMENT), strict=True)
    moved = stated_placement(placement) != usual_axes(placement)
    return (*(SMALL_SWITCH * (axis != usual) for axis, usual in order), SMALL_SWITCH * moved)


def stated(size: float, scale: float) -> Coordinates:
    """Stating a number is `size` length scales from leaving it to others (0), and doubling it `scale`."""
    return lambda number: (size * (number > 0), scale * math.log2(max(number, 1)))
