"""The trainers that a layout can be written for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trimaran.layout.layout import Layout
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.export.deepspeed import deepspeed
from trimaran.planner.export.megatron_deepspeed import megatron_deepspeed
from trimaran.planner.export.megatron_lm import megatron_lm
from trimaran.planner.export.torchtitan import torchtitan

Exporter = Callable[[Layout, Workload, Stack], str]

EXPORTERS: dict[str, Exporter] = {
    "megatron-lm": megatron_lm,
    "megatron-deepspeed": megatron_deepspeed,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
}


def export(layout: Layout, workload: Workload, stack: Stack, to: str) -> str:
    """Flags or a configuration file of the trainer `to`, which does what the layout says.

    Raises TrimaranError where the trainer is not known, or has no flag for what the layout asks.
    """
    exporter = EXPORTERS.get(to)
    if exporter is None:
        raise TrimaranError(f"export to {to!r} is not known: choose one of {', '.join(EXPORTERS)}")
    return exporter(layout, workload, stack)


def first_exported(layouts: Sequence[Layout], workload: Workload, stack: Stack, to: str) -> tuple[Layout, str]:
    """The first of the layouts that the trainer can state, and its text.

    Raises TrimaranError with the first layout's reason where it can state none.
    """
    refused: TrimaranError | None = None
    for layout in layouts:
        try:
            return layout, export(layout, workload, stack, to)
        except TrimaranError as error:
            refused = refused or error
    raise refused or TrimaranError("no layout is given: name at least one")
