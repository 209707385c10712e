"""Measurements as a CSV table in the contract's columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from trimaran.columns import COLUMNS
from trimaran.files import write_atomically
from trimaran.measurement import Measurement


def export_csv(measurements: Iterable[Measurement], path: str | Path) -> int:
    """Write the rows to `path`, whole or not at all, and return their number.

    What was not measured is an empty cell.
    """
    names = [column.name for column in COLUMNS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    rows = 0
    for measurement in measurements:
        writer.writerow([getattr(measurement, name) for name in names])
        rows += 1
    write_atomically(path, text.getvalue())
    return rows
