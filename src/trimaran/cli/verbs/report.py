"""`trimaran report`: measurements, a plan or a training as a table, a page or a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimaran.cli.options import FormatOption, OutputFormat, written_file
from trimaran.cli.terminal import tell


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="Stores, CSV tables, one plan (`trimaran plan --format json`), or the folder of one training.",
            metavar="SOURCE...",
        ),
    ],
    recipe: Annotated[str | None, typer.Option(help="Only rows of this recipe.")] = None,
    output: Annotated[
        Path | None,
        written_file("Write a file: .html a page, .png .svg .pdf a figure, .csv .parquet all columns."),
    ] = None,
    figure: Annotated[
        str | None, typer.Option(help="Which figure: front, parts, memory, predicted, scaling or losses.")
    ] = None,
    form: FormatOption = OutputFormat.table,
) -> None:
    """Show what was measured, predicted beside measured: as a table, a page or a figure; a plan as a page or a figure.

    Of a training's folder (runs/NAME/train): loss, speed, checkpoints, faults, and where its time went.

    Example: trimaran report runs/laptop/store.sqlite -o report.html
    """
    from trimaran.files.catalogue import write_atomically
    from trimaran.nouns.noun import TrimaranError
    from trimaran.report.figures import ENDINGS, write_figure
    from trimaran.report.life.life_page import life_page
    from trimaran.report.life.record import life_lines, life_of, training_folder
    from trimaran.report.measured_rows import FIELDS, records
    from trimaran.report.page.html import page
    from trimaran.report.sources import content_of, rows_of_each
    from trimaran.report.tables import render
    from trimaran.store import export_table

    if (folder := training_folder(sources[0])) is not None:
        others = len(sources) > 1 or figure is not None or recipe is not None or form != OutputFormat.table
        if others or (output is not None and output.suffix.lower() != ".html"):
            raise TrimaranError(f"{sources[0]} is a training: report it by itself, as text or with -o life.html")
        life = life_of(folder)
        if output is None:
            tell(life_lines(life))
        else:
            write_atomically(output, life_page(life))
            tell(f"page written to {output}: open it in a browser, it needs no network", err=True)
        return
    if output is not None and form is not OutputFormat.table:
        raise TrimaranError(
            f"--format {form.value} is of what is printed, and {output} is written as its ending says: leave one out"
        )
    if figure is not None and (output is None or output.suffix.lower() not in ENDINGS):
        raise TrimaranError(f"--figure {figure} is drawn into a file: give -o {figure}.svg (or .png, .pdf)")
    if output is None:
        rows = [row for rows in rows_of_each(sources, recipe) for row in rows]
        tell(render(records(rows), FIELDS, form.value))
        return
    if output.suffix.lower() == ".html":
        write_atomically(output, page(content_of(sources, recipe)))
        tell(f"page written to {output}: open it in a browser, it needs no network", err=True)
    elif output.suffix.lower() in ENDINGS:
        write_figure(figure or "front", content_of(sources, recipe), output)
        tell(f"figure {figure or 'front'} written to {output}", err=True)
    else:
        rows = [row for rows in rows_of_each(sources, recipe) for row in rows]
        tell(f"{export_table(rows, output)} rows written to {output}", err=True)
