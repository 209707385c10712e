"""A table as the text that is written of it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from trimaran.files.row_table import write_table
from trimaran.nouns.measurement import Measurement


def table_text(rows: Sequence[Measurement]) -> str:
    """The CSV of the table contract that is written of some rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        assert write_table(path, rows) == len(rows)
        return path.read_text()
