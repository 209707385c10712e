"""What tables and the page show of a layout: a column for each choice that has a heading, and the global batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from trimaran.layout.choice import Choice, Heading
from trimaran.layout.choices import CHOICES
from trimaran.layout.layout import Layout
from trimaran.nouns.measurement import Measurement
from trimaran.report.tables import Field

_HEADED = tuple((choice, choice.heading) for choice in CHOICES if choice.heading)
PLANNED: tuple[tuple[Choice, Heading], ...] = _HEADED
# Measured rows have no column for what a plan says only where it is not as usual.
MEASURED: tuple[tuple[Choice, Heading], ...] = tuple((c, heading) for c, heading in _HEADED if heading.blank != "row")


def layout_fields(shown: Sequence[tuple[Choice, Heading]]) -> Iterator[Field]:
    """A printed column for each choice, and for the global batch behind the micro-batch."""
    for choice, heading in shown:
        yield Field(heading.key or choice.name, heading.title, left=bool(choice.words))
        if choice.name == "mbs":
            yield Field("gbs", "GBS")


def layout_cells(
    shown: Sequence[tuple[Choice, Heading]], row: Layout | Measurement, gbs: int, unused: frozenset[str]
) -> Iterator[tuple[str, Any]]:
    """What a record holds under `layout_fields`; nothing of `unused` choices, nor of defaults that are left blank."""
    for choice, heading in shown:
        value = getattr(row, choice.name)
        blank = choice.name in unused or (heading.blank == "row" and value == choice.default)
        yield heading.key or choice.name, None if blank else "yes" if value is True else value
        if choice.name == "mbs":
            yield "gbs", gbs


def unused(shown: Sequence[tuple[Choice, Heading]], rows: Iterable[Layout | Measurement]) -> frozenset[str]:
    """The choices that a table leaves out where all its rows have the default.

    A plan says a number that matters (its ZeRO stage) all the same, a table of runs does not.
    """
    left_out = {
        c.name: {c.default, c.cell(c.default)}
        for c, heading in shown
        if heading.blank == "table" or (shown is MEASURED and c.bounds and heading.dull)
    }
    for row in rows:
        for name in [name for name, default in left_out.items() if getattr(row, name) not in default]:
            del left_out[name]
    return frozenset(left_out)
