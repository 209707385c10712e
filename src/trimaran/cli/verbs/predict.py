"""`trimaran predict`: a table of runs, each predicted beside what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.cli.options import CalibrationOption, ClusterOption, FormatOption, OutputFormat, StackOption, written_file
from trimaran.cli.terminal import tell, tell_each

if TYPE_CHECKING:
    from trimaran.cost.table.predict_table import PredictedRow


def predict(
    table: Annotated[
        str,
        typer.Argument(help="CSV of the table contract, name of a packaged table (seeds), or a recipe with tables."),
    ],
    output: Annotated[Path | None, written_file("CSV to write, predictions added.")] = None,
    cluster: ClusterOption = None,
    stack: StackOption = None,
    calibration: CalibrationOption = None,
    form: FormatOption = OutputFormat.table,
) -> None:
    """Predict every row of a table; where it holds measurements, score the predictions.

    Example: trimaran predict seeds -o predicted.csv

    Example: trimaran predict recipes/bloom-176b.toml
    """
    from trimaran.files.catalogue import catalogue_names, load_cluster, load_stack, write_atomically
    from trimaran.files.row_table import misspelt_columns, packaged_table, packaged_tables, read_table
    from trimaran.nouns.noun import TrimaranError

    if cluster is not None:
        load_cluster(cluster)
    if stack is not None:
        load_stack(stack)
    if table.endswith(".toml") or table in catalogue_names("recipes"):
        for option, value in {"--cluster": cluster, "--stack": stack}.items():
            if value is not None:
                raise TrimaranError(
                    f"{option} {value} is of rows that name none, and a recipe's tables name theirs: leave it out"
                )
        _published(table, output, calibration, form)
        return
    stated = packaged_table(table) if table in packaged_tables() else read_table(table)
    if not stated.rows:
        raise TrimaranError(f"table {table} has a header but no rows: add a line for each run")
    # the cost model takes half a second of a core to come, which a mistake should not cost
    from trimaran.cost.calibration import load_calibration
    from trimaran.cost.table.predict_table import predict_table, score_groups
    from trimaran.report.predicted import told_once
    from trimaran.report.scores import FIELDS, csv_with_predictions, records
    from trimaran.report.tables import render

    if misspelt := misspelt_columns(stated.header):
        tell_each([f"note: {'; '.join(misspelt)}"])
    known = load_calibration(calibration) if calibration not in (None, "none") else None
    rows = predict_table(stated, cluster=cluster, stack=stack, calibration=known, priors_only=calibration == "none")
    if output is not None:
        write_atomically(output, csv_with_predictions(stated.header, rows))
    refused = [row for row in rows if row.error]
    tell_each([_refusal(row) for row in refused])
    tell_each([f"note: {note}" for note in told_once((row.row.number, row.notes) for row in rows)])
    if len(refused) < len(rows):
        tell(f"{len(rows) - len(refused)} of {len(rows)} rows answered, {len(refused)} refused", err=True)
    scores = score_groups(rows)
    if scores:
        tell(render(records(scores), FIELDS, form.value))
    elif output is None and len(refused) < len(rows):
        tell(csv_with_predictions(stated.header, rows).rstrip("\n"))
    if len(refused) == len(rows):
        raise TrimaranError(f"none of {len(rows)} rows of {table} could be answered: mend what is said of each")


def _refusal(row: PredictedRow) -> str:
    reason = row.error or ""
    label = "" if reason.startswith("row ") else f"row {row.row.number}: "
    return f"refused {label}{reason}"


def _published(path: str, output: Path | None, calibration: str | None, form: OutputFormat) -> None:
    """Predict a recipe's published tables row by row, each beside what was published, and score them."""
    from trimaran.files.catalogue import write_atomically
    from trimaran.files.recipe_file import load_recipe
    from trimaran.report.scores import as_json, as_text, csv_with_predictions
    from trimaran.study.published.predicted_tables import predict_published

    tables = predict_published(load_recipe(path), calibration)
    if output is not None:
        write_atomically(
            output, csv_with_predictions(tables[0].header, [row for table in tables for row in table.rows])
        )  # fmt: skip
    tell(as_json(tables) if form.value == "json" else as_text(tables, form.value))
