"""Predictions scored against what was measured, and written down: as a table, as JSON, as CSV columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from trimaran.cost.table.predict_table import PREDICTED_COLUMNS, GroupScore, PredictedRow
from trimaran.nouns.text import spreadsheet_cell
from trimaran.report import predicted
from trimaran.report.tables import Field, Format, render
from trimaran.study.published.predicted_tables import PredictedTable

FIELDS = (
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
)


def records(scores: Sequence[GroupScore]) -> list[dict[str, object]]:
    """One record a group of rows that may be ranked against each other."""
    return [_record(score) for score in scores]


def csv_with_predictions(header: Sequence[str], rows: Sequence[PredictedRow]) -> str:
    """The rows' table as CSV, the columns of the predictions added."""
    names = [*header, *(name for name in PREDICTED_COLUMNS if name not in header)]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n", restval="", extrasaction="ignore")
    writer.writerow({name: spreadsheet_cell(name) for name in names})
    for row in rows:
        cells = row.row.cells | row.cells()
        writer.writerow({name: spreadsheet_cell(cell) for name, cell in cells.items()})
    return out.getvalue()


def as_json(tables: Sequence[PredictedTable]) -> str:
    """Every published table with its rows and its scores."""
    objects = [
        {"table": table.published.name, "rows": predicted.records(table.rows), "scores": records(table.scores)}
        for table in tables
    ]
    return json.dumps(objects, indent=2, allow_nan=False)


def as_text(tables: Sequence[PredictedTable], form: Format) -> str:
    """Every published table under its name, and the scores of all below."""
    lines = []
    for table in tables:
        title = f"### {table.published.name}" if form == "markdown" else table.published.name
        lines.append(f"{title}\n\n{render(predicted.records(table.rows), predicted.FIELDS, form)}\n")
    totals = [_record(table.scores[-1]) | {"group": table.published.name} for table in tables if table.scores]
    return "\n".join([*lines, render(totals, FIELDS, form)])


def _record(score: GroupScore) -> dict[str, object]:
    time, memory = score.time, score.memory
    return {
        "group": score.group,
        "rows": time.rows if time else 0,
        "sec_per_it_mape": time.mape if time else None,
        "rank_tau": time.tau if time else None,
        "top1_regret": time.regret if time else None,
        "mem_rows": memory.rows if memory else 0,
        "mem_mape": memory.mape if memory else None,
        "oom_rows": score.oom_rows,
        "oom_found": score.oom_found,
        "false_alarms": score.false_alarms,
    }
