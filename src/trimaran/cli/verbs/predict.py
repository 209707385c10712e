"""`trimaran predict`: a table of runs, each predicted beside what was measured."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.cli.options import CalibrationOption, ClusterOption, FormatOption, OutputFormat, StackOption

if TYPE_CHECKING:
    from trimaran.cost.predict import GroupScore, PredictedRow
    from trimaran.report.tables import Field, Format


def predict(
    table: Annotated[
        str,
        typer.Argument(help="CSV of the table contract, name of a packaged table (seeds), or a study's RECIPE.toml."),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="CSV to write, predictions added.")] = None,
    cluster: ClusterOption = None,
    stack: StackOption = None,
    calibration: CalibrationOption = None,
    form: FormatOption = OutputFormat.table,
) -> None:
    """Predict every row of a table; where it holds measurements, score the predictions.

    Example: trimaran predict seeds -o predicted.csv

    Example: trimaran predict recipes/bloom-176b.toml
    """
    from trimaran.cost.calibration import load_calibration
    from trimaran.cost.predict import predict_table, score_groups
    from trimaran.files.catalogue import load_cluster, load_stack, write_atomically
    from trimaran.files.row_table import misspelt_columns, packaged_table, packaged_tables, read_table
    from trimaran.nouns.noun import TrimaranError
    from trimaran.report.tables import render

    if cluster is not None:
        load_cluster(cluster)
    if stack is not None:
        load_stack(stack)
    if table.endswith(".toml"):
        _study(table, output, calibration, form)
        return
    rows = packaged_table(table) if table in packaged_tables() else read_table(table)
    if not rows.rows:
        raise TrimaranError(f"table {table} has a header but no rows: add a line for each run")
    for sentence in misspelt_columns(rows.header):
        typer.echo(f"note: {sentence}", err=True)
    given = load_calibration(calibration) if calibration not in (None, "none") else None
    found = predict_table(rows, cluster=cluster, stack=stack, calibration=given, priors_only=calibration == "none")
    if output is not None:
        write_atomically(output, _csv(rows.header, found))
    refused = [p for p in found if p.error]
    for prediction in refused:
        reason = prediction.error or ""
        label = "" if reason.startswith("row ") else f"row {prediction.row.number}: "
        typer.echo(f"refused {label}{reason}", err=True)
    typer.echo(f"{len(found) - len(refused)} of {len(found)} rows answered, {len(refused)} refused", err=True)
    scores = score_groups(found)
    if scores:
        typer.echo(render([_record(s) for s in scores], _fields(), form.value))
    elif output is None:
        typer.echo(_csv(rows.header, found).rstrip("\n"))
    if len(refused) == len(found):
        raise TrimaranError(f"none of {len(found)} rows of {table} could be answered: mend what is said of each")


def _study(recipe: str, output: Path | None, calibration: str | None, form: OutputFormat) -> None:
    """Predict a study's published tables row by row, each beside what was published, and score them."""
    import json

    from trimaran.cost.calibration import load_calibration
    from trimaran.cost.predict import predict_table, score_groups
    from trimaran.files.catalogue import write_atomically
    from trimaran.files.recipe_file import load_recipe
    from trimaran.files.row_table import study_table
    from trimaran.report.predicted import FIELDS, records
    from trimaran.report.tables import render
    from trimaran.study.published.measure import chosen_tables

    printed: Format = form.value
    given = load_calibration(calibration) if calibration not in (None, "none") else None
    answered = []
    for asked in chosen_tables(load_recipe(recipe), []):
        rows = study_table(asked)
        found = predict_table(rows, calibration=given, priors_only=calibration == "none")
        answered.append((asked, rows, found, score_groups(found)))
    if output is not None:
        header = answered[0][1].header
        write_atomically(output, _csv(header, [row for _, _, found, _ in answered for row in found]))
    if form is OutputFormat.json:
        told = [
            {"table": t.name, "rows": records(f), "scores": [_record(s) for s in scores]}
            for t, _, f, scores in answered
        ]
        typer.echo(json.dumps(told, indent=2, allow_nan=False))
        return
    for asked, _, found, _ in answered:
        title = f"### {asked.name}" if form is OutputFormat.markdown else asked.name
        typer.echo(f"{title}\n\n{render(records(found), FIELDS, printed)}\n")
    summed = [_record(scores[-1]) | {"group": asked.name} for asked, _, _, scores in answered if scores]
    typer.echo(render(summed, _fields(), printed))


def _csv(header: tuple[str, ...], found: list[PredictedRow]) -> str:
    from trimaran.cost.predict import PREDICTED_COLUMNS

    names = [*header, *(name for name in PREDICTED_COLUMNS if name not in header)]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n", restval="", extrasaction="ignore")
    writer.writeheader()
    for prediction in found:
        writer.writerow(prediction.row.cells | prediction.cells())
    return out.getvalue()


def _record(scored: GroupScore) -> dict[str, object]:
    time, memory = scored.time, scored.memory
    return {
        "group": scored.group,
        "rows": time.rows if time else 0,
        "sec_per_it_mape": time.mape if time else None,
        "rank_tau": time.tau if time else None,
        "top1_regret": time.regret if time else None,
        "mem_rows": memory.rows if memory else 0,
        "mem_mape": memory.mape if memory else None,
        "oom_rows": scored.oom_rows,
        "oom_found": scored.oom_found,
        "false_alarms": scored.false_alarms,
    }


def _fields() -> list[Field]:
    from trimaran.report.tables import Field

    return [
        Field("group", "Group", left=True),
        Field("rows", "Rows"),
        Field("sec_per_it_mape", "Sec/it MAPE", ".1%"),
        Field("rank_tau", "Rank tau", ".2f"),
        Field("top1_regret", "Top-1 regret", ".1%"),
        Field("mem_rows", "Mem rows"),
        Field("mem_mape", "Mem MAPE", ".1%"),
        Field("oom_rows", "OOM rows"),
        Field("oom_found", "OOM found"),
        Field("false_alarms", "False alarms"),
    ]
