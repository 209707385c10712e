"""Whether what a checkpoint keeps of each replica fits those of the layout that goes on from it."""

from __future__ import annotations

from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.noun import TrimaranError


def check_local_steps(saved_on: str, layout: Layout) -> None:
    """Raise TrimaranError where replicas train apart on one of the layouts and not so on the other.

    Each of them has weights and an inner optimizer of its own, of which no other number of replicas can be made.
    """
    before = parse_layout(saved_on)
    saved, stated = (_in_words(each) for each in (before, layout))
    if saved != stated:
        raise TrimaranError(
            f"layout {layout} has {stated}, and the checkpoint is of {saved}: go on with that, or begin anew with "
            f"train.init_from at the checkpoint"
        )


def keeps_errors(saved_on: str, layout: Layout) -> bool:
    """Whether a checkpoint has what each replica of the layout had not sent."""
    before = parse_layout(saved_on)
    return before.compression != "none" and _replicas(before) == _replicas(layout)


def _replicas(layout: Layout) -> int:
    return layout.size("replicate")


def _in_words(layout: Layout) -> str:
    """How replicas train apart, and what of it a checkpoint in the middle of a round depends on."""
    if not layout.local_steps:
        return "no local steps"
    told = f"{layout.local_steps} local steps of {_replicas(layout)} replicas"
    fragments = f" in {layout.fragments} fragments" if layout.fragments > 1 else ""
    return told + fragments + (f", agreed on {layout.outer_delay} steps later" if layout.outer_delay else "")
