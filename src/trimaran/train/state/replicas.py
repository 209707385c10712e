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
    saved, stated = ((each.local_steps, _replicas(each)) for each in (before, layout))
    if saved != stated and (saved[0] or stated[0]):
        raise TrimaranError(
            f"layout {layout} has {_in_words(*stated)}, and the checkpoint is of {_in_words(*saved)}: go on with that, "
            f"or begin anew with train.init_from at the checkpoint"
        )


def keeps_errors(saved_on: str, layout: Layout) -> bool:
    """Whether a checkpoint has what each replica of the layout had not sent."""
    before = parse_layout(saved_on)
    return before.compression != "none" and _replicas(before) == _replicas(layout)


def _replicas(layout: Layout) -> int:
    return layout.size("replicate")


def _in_words(steps: int, replicas: int) -> str:
    return f"{steps} local steps of {replicas} replicas" if steps else "no local steps"
