"""What a dry run traced, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from trimaran.layout.layout import Layout
from trimaran.report.tables import Field, Record, render

FIELDS = (
    Field("rank", "rank", left=True),
    Field("what", "in one step", left=True),
    Field("traced", "traced", ".3f"),
    Field("planned", "planned", ".3f"),
    Field("unit", "", left=True),
    Field("off", "off", "+.1%"),
    Field("count", "collectives"),
)


def dry_run_table(layout: Layout, cluster: str, rows: Sequence[Record]) -> str:
    """The rows of `trimaran.study.dry_run` of a layout as a console table under a heading."""
    return f"{layout} on {cluster}, one step:\n{render(rows, FIELDS, 'table')}"
