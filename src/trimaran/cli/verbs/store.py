"""`trimaran store`: look into a store, compare two of its runs, take rows out and merge others in."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.cli.options import FormatOption, OutputFormat, written_file
from trimaran.cli.terminal import tell

if TYPE_CHECKING:
    from trimaran.store import Run

store = typer.Typer(
    no_args_is_help=True,
    help="Look into a store of measurements.\n\nExample: trimaran store runs/laptop/store.sqlite list --sort mem_gib",
)

WhereOption = Annotated[
    list[str] | None,
    typer.Option("--where", help="Only rows that meet it: status=ok, 'sec_per_it<120', notes~NUMA. Repeatable."),
]
AllOption = Annotated[bool, typer.Option("--all", help="Every attempt at a trial, not the last alone.")]


@store.callback()
def _open(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="Store, as runs/laptop/store.sqlite.", metavar="STORE.sqlite")],
) -> None:
    """The store that the commands below speak of."""
    context.obj = path


@store.command("list")
def list_(
    context: typer.Context,
    where: WhereOption = None,
    sort: Annotated[str | None, typer.Option(help="Column to order by. Default: as stored.")] = None,
    every: AllOption = False,
    form: FormatOption = OutputFormat.table,
) -> None:
    """List the runs with their numbers.

    Example: trimaran store runs/laptop/store.sqlite list --where status=ok --sort sec_per_it
    """
    from trimaran.report.layouts import MEASURED, unused
    from trimaran.report.measured_rows import FIELDS, record
    from trimaran.report.tables import Field, render
    from trimaran.store import Store
    from trimaran.store.filter import parse_condition, sort_key

    conditions = [parse_condition(text) for text in where or []]
    key = sort_key(sort) if sort is not None else None
    with Store(context.obj, create=False) as opened:
        runs = opened.chosen(conditions, every_attempt=every)
        left_out = unused(MEASURED, runs.measurements)
        ordered = []
        for run in runs:
            head = {"number": run.number, "from": _origin(run), "quality": run.measurement.quality}
            ordered.append((key(run.measurement) if key else (), head | record(run.measurement, left_out)))
    if key:
        ordered.sort(key=lambda pair: pair[0])
    lines = [line for _, line in ordered]
    if not lines:
        tell(f"no run in {context.obj} meets {' and '.join(where or ['these terms'])}", err=True)
    number, origin, quality = Field("number", "#"), Field("from", "From", left=True), Field("quality", "Quality")
    tell(render(lines, [number, origin, *FIELDS[:-1], quality, FIELDS[-1]], form.value))


@store.command()
def show(
    context: typer.Context,
    number: Annotated[int, typer.Argument(help="The run's number, as `list` prints it.")],
    form: FormatOption = OutputFormat.table,
) -> None:
    """Show all that is stored of one run: its row, step times, environment, evidence.

    Example: trimaran store runs/laptop/store.sqlite show 3
    """
    from trimaran.report.tables import Field, render

    run = _run(context.obj, number)
    fields = {"number": run.number, "attempt": run.attempt, **run.measurement.model_dump(mode="json")}
    if form.value == "json":
        tell(json.dumps(fields, indent=2, allow_nan=False))
        return
    lines = [{"field": name, "value": value} for name, value in fields.items() if value not in (None, [], {})]
    tell(render(lines, [Field("field", "Field", left=True), Field("value", "Value", left=True)], form.value))


@store.command()
def compare(
    context: typer.Context,
    a: Annotated[int, typer.Argument(help="Number of the run to compare with.", metavar="A")],
    b: Annotated[int, typer.Argument(help="Number of the other run.", metavar="B")],
    form: FormatOption = OutputFormat.table,
) -> None:
    """Compare run B with run A: what differs, by how much, and how sure that is by their step times.

    Example: trimaran store runs/laptop/store.sqlite compare 3 7
    """
    from trimaran.report.tables import Field, render
    from trimaran.store.compare import compare as compare_runs

    comparison = compare_runs(_run(context.obj, a).measurement, _run(context.obj, b).measurement)
    if form.value == "json":
        tell(
            json.dumps({"a": a, "b": b, **asdict(comparison), "verdict": comparison.verdict}, indent=2, allow_nan=False)
        )
        return
    lines = [{"column": name, "a": pair[0], "b": pair[1]} for name, pair in comparison.differs.items()]
    fields = [Field("column", "Column", left=True), Field("a", f"A (run {a})"), Field("b", f"B (run {b})")]
    tell(render(lines, fields, form.value) if lines else "the runs differ in no column")
    tell(comparison.verdict, err=form.value != "table")


@store.command()
def export(
    context: typer.Context,
    output: Annotated[Path, written_file("File to write: .csv or .parquet.")],
    where: WhereOption = None,
    every: AllOption = False,
) -> None:
    """Write runs as CSV of the table contract, or as Parquet with step times and environment.

    Example: trimaran store runs/laptop/store.sqlite export -o runs.parquet
    """
    from trimaran.store import Store, export_table
    from trimaran.store.filter import parse_condition

    conditions = [parse_condition(text) for text in where or []]
    with Store(context.obj, create=False) as opened:
        number = export_table(opened.chosen(conditions, every_attempt=every).measurements, output)
    tell(f"{number} rows written to {output}")


@store.command()
def merge(
    context: typer.Context,
    others: Annotated[list[Path], typer.Argument(help="Stores to take runs from.", metavar="OTHER.sqlite...")],
) -> None:
    """Add the runs of other stores that are not here yet; the others stay as they are.

    Example: trimaran store all.sqlite merge runs/laptop/store.sqlite runs/desktop/store.sqlite
    """
    from trimaran.store import Store

    with ExitStack() as stack:
        # all are opened, and read to their ends, in one transaction: a damaged one leaves this store alone
        opened = [stack.enter_context(Store(path, create=False)) for path in others]
        counts = [other.count() for other in opened]
        rows = ((run.measurement for run in other.each(every_attempt=True)) for other in opened)
        with Store(context.obj) as target:
            added = target.add_new_of(rows)
    for path, new, of in zip(others, added, counts, strict=True):
        tell(f"{new} of {of} runs added from {path}")


def _run(path: Path, number: int) -> Run:
    from trimaran.store import Store

    with Store(path, create=False) as opened:
        return opened.run(number)


def _origin(run: Run) -> str:
    """Where a row comes from: the table of a document, a log, or a recipe's trial."""
    row = run.measurement
    published = " ".join(part for part in (row.source, row.table, row.row) if part)
    return published or " ".join(part for part in (row.recipe, row.layout_label) if part)
