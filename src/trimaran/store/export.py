"""Measurements as a CSV table in the contract's columns."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterable
from pathlib import Path

from trimaran.columns import COLUMNS
from trimaran.measurement import Measurement
from trimaran.noun import TrimaranError


def export_csv(measurements: Iterable[Measurement], path: str | Path) -> int:
    """Write the rows to `path` and return their number.

    The file appears whole or not at all. What was not measured is an empty cell.
    """
    path = Path(path)
    names = [column.name for column in COLUMNS]
    rows = 0
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            for measurement in measurements:
                writer.writerow([getattr(measurement, name) for name in names])
                rows += 1
        partial.replace(path)
    except OSError as error:
        raise TrimaranError(f"{path}: the table cannot be written ({error.strerror})") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return rows
