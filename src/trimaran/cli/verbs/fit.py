"""`trimaran fit`: a calibration of the cost model from measured rows."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.cli.options import ClusterOption, StackOption, written_file
from trimaran.cli.terminal import tell, tell_each

if TYPE_CHECKING:
    from trimaran.cost.fit.learn import Lesson
    from trimaran.nouns.measurement import Measurement

    _Numbered = tuple[int, Measurement]


# What runs that resemble measured ones are moved by is told from here on (log).
LEAST_SHOWN = 0.001


def fit(
    table: Annotated[str, typer.Argument(help="CSV of the table contract, a store, or a packaged table's name.")],
    output: Annotated[Path, written_file("Calibration file to write.")],
    cluster: ClusterOption = None,
    stack: StackOption = None,
) -> None:
    """Fit the cost model to measured rows, from what is known before; say what they taught and how well that holds.

    Example: trimaran fit runs/laptop/store.sqlite --cluster runs/laptop/cluster.toml -o laptop.calibration.toml
    """
    from trimaran.cost.calibration import save_calibration
    from trimaran.cost.fit.fit_rows import fit_rows
    from trimaran.files.catalogue import load_cluster
    from trimaran.report.predicted import told_once

    if cluster is not None:
        load_cluster(cluster)  # a name that does not exist is told before any row is read
    rows, refused = _measured_rows(table)
    tell_each([f"refused {reason}" for reason in refused])
    rows = _of(rows, cluster, stack)
    fitted = fit_rows([row for _, row in rows], cluster=cluster, stack=stack, numbers=[number for number, _ in rows])
    save_calibration(fitted.calibration, output)
    tell_each([f"skipped {reason}" for reason in fitted.skipped])
    for note in told_once(fitted.notes):
        tell(f"note: {note}", err=True)
    shown = [f"{fitted.rows} rows in {fitted.groups} groups"]
    shown += [f"sec/it error on left-out groups {fitted.time_mape:.1%}"] if fitted.time_mape is not None else []
    shown += [f"memory error {fitted.mem_mape:.1%}"] if fitted.mem_mape is not None else []
    if fitted.groups < 2:
        shown.append("one group alone leaves nothing to judge the fit by: the error that its belief expects stands")
    tell(f"{output}: fitted to {'; '.join(shown)}")
    for lesson in fitted.lessons:
        for line in _told(lesson):
            tell(line)
    if fitted.calibration.days:
        days = ", ".join(f"{day} x {scale:.3f}" for day, scale in sorted(fitted.calibration.days.items()))
        tell(f"days: {days}")


def _told(lesson: Lesson) -> list[str]:
    """What the rows taught of time or memory, and what they could not tell, in words."""
    name = lesson.quantity.name
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in sorted(lesson.kinds.items(), key=lambda kind: -kind[1]))
    lines = [f"{name}: unseen runs err by {lesson.error:.1%} (1 sigma); errors are of {kinds}"]
    if lesson.moves:
        moves = (f"{m.name} {m.before:.4g} -> {m.after:.4g} (x/ {math.exp(m.sigma):.2f})" for m in lesson.moves)
        lines.append(f"{name}: {', '.join(moves)}")
    if lesson.similar >= LEAST_SHOWN:
        lines.append(f"{name}: runs like the measured ones are moved by {lesson.similar:.1%} at most beside that")
    if lesson.unseen:
        lines.append(f"{name}: not shown by these rows: {', '.join(lesson.unseen)}")
    if lesson.tangled:
        pairs = ", ".join(" and ".join(pair) for pair in lesson.tangled)
        lines.append(f"{name}: not told apart by these rows: {pairs}")
    return lines


def _measured_rows(table: str) -> tuple[list[_Numbered], list[str]]:
    """The rows of a packaged table, a store or a CSV with their numbers there, and why others could not be read."""
    from trimaran.files.row_table import packaged_table, packaged_tables, read_table
    from trimaran.store import Store

    if table.endswith(".sqlite") and table not in packaged_tables():
        with Store(table, create=False) as store:
            return [(run.number, run.measurement) for run in store.runs()], []
    stated = packaged_table(table) if table in packaged_tables() else read_table(table)
    rows = [(row.number, row.measurement) for row in stated.rows if row.measurement is not None]
    return rows, [row.error for row in stated.rows if row.measurement is None and row.error]


def _of(rows: list[_Numbered], cluster: str | None, stack: str | None) -> list[_Numbered]:
    """The rows that are of this cluster and stack, or name none. Raises TrimaranError where all are of others."""
    from trimaran.files.catalogue import catalogue_name, load_cluster, load_stack
    from trimaran.nouns.noun import TrimaranError

    for kind, given, load in (("cluster", cluster, load_cluster), ("stack", stack, load_stack)):
        if given is None or not rows:
            continue
        # A file's rows name it by its path, by what the file is called, or by the name that it states.
        names = {given, Path(given).stem if given.endswith((".toml", ".json")) else given, load(given).name}
        cells = [getattr(row, kind) for _, row in rows]
        others = {cell for cell in set(cells) - names - {None} if catalogue_name(f"{kind}s", cell) not in names}
        kept = [
            (number, row.model_copy(update={kind: given}))
            for (number, row), cell in zip(rows, cells, strict=True)
            if cell not in others
        ]
        if not kept:
            raise TrimaranError(
                f"fit: none of {len(rows)} rows is of {kind} {given}, the first is of {cells[0]}: "
                f"give that by --{kind}, by its name or its file"
            )
        if others:
            counts = Counter(cell for cell in cells if cell in others).most_common()
            named = ", ".join(f"{count} of {cell}" for cell, count in counts)
            tell_each([f"note: {len(rows) - len(kept)} of {len(rows)} rows are left out, of another {kind}: {named}"])
        rows = kept
    return rows
