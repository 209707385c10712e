"""The lines of a training's log: where it went back, those that it made again come later and stand."""

from __future__ import annotations

from collections.abc import Sequence


def standing(iterations: Sequence[int]) -> list[int]:
    """Places of the lines that stand, in order: a line undoes those before it of the same or a later iteration."""
    places: list[int] = []
    for place, iteration in enumerate(iterations):
        while places and iterations[places[-1]] >= iteration:
            places.pop()
        places.append(place)
    return places
