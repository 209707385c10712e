"""`trimaran report`: a store's measurements as a table in the documents' columns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.options import FormatOption, OutputFormat


def report(
    store: Annotated[Path, typer.Argument(help="Store, as runs/laptop/store.sqlite.", metavar="STORE.sqlite")],
    recipe: Annotated[str | None, typer.Option(help="Only rows of this recipe.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to a file: all columns as CSV.")] = None,
    form: FormatOption = OutputFormat.table,
) -> None:
    """Print what was measured, predicted beside measured; or write it as CSV of the table contract.

    Example: trimaran report runs/laptop/store.sqlite --format markdown
    """
    from trimaran.report.measured import FIELDS, records
    from trimaran.report.tables import render
    from trimaran.store import Store, export_csv

    with Store(store, create=False) as opened:
        rows = opened.measurements(recipe=recipe)
    if output is not None:
        typer.echo(f"{export_csv(rows, output)} rows written to {output}", err=True)
        return
    typer.echo(render(records(rows), FIELDS, form.value))
