"""Refusals: what a layout asks and a trainer has no flag for is said, never dropped."""

from __future__ import annotations

from collections.abc import Iterable

from trimaran.layout.layout import Layout
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError


def untold_traits(model: Model, *told: str) -> tuple[tuple[bool, str], ...]:
    """The model's traits, of which a trainer can state those `told`, as what refuse_first takes."""
    return tuple((trait not in told, f"model.{trait} {value}") for trait, value in model.traits.items())


def untold_degrees(layout: Layout) -> tuple[tuple[bool, str], ...]:
    """Degrees that no exporter states yet, as what refuse_first takes."""
    return (
        (layout.cp > 1, f"CP {layout.cp}"),
        (layout.shard not in (0, layout.dp), f"shard {layout.shard}"),
        (layout.ep > 1, f"EP {layout.ep}"),
        (layout.etp > 1, f"ETP {layout.etp}"),
        (layout.offload != "none", f"offload {layout.offload}"),
    )


def refuse_first(trainer: str, layout: Layout, asked: Iterable[tuple[bool, str]]) -> None:
    """Raise TrimaranError for the first thing that is asked (True) and that the trainer cannot state."""
    for wanted, what in asked:
        if wanted:
            raise TrimaranError(
                f"layout {layout} cannot be written for {trainer}: it has no setting for {what}; "
                f"state a choice that it has with --layout or --fix, or another trainer with --to"
            )
