"""A Measurement as a row of SQL cells, and back."""

from __future__ import annotations

import json
import sqlite3

from pydantic import ValidationError

from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError, first_error

FIELDS: tuple[str, ...] = tuple(Measurement.model_fields)
_JSON_FIELDS = frozenset({"step_times_s", "losses", "mem_gib_per_rank", "libraries", "environment"})


def quoted(name: str) -> str:
    """A column name as SQL wants it (`table` is a keyword)."""
    return f'"{name}"'


def to_cells(measurement: Measurement) -> list[object]:
    """The cells of one row, in the order of FIELDS."""
    dumped = measurement.model_dump(mode="json")
    return [json.dumps(dumped[name]) if name in _JSON_FIELDS else dumped[name] for name in FIELDS]


def from_cells(row: sqlite3.Row) -> Measurement:
    """The Measurement in one row; a store of an earlier version, opened only to be read, lacks later columns.

    Raises TrimaranError naming the row that does not hold one.
    """
    names = [name for name in FIELDS if name in row.keys()]  # noqa: SIM118 - a Row iterates over its cells
    try:
        return Measurement.model_validate(
            {name: json.loads(row[name]) if name in _JSON_FIELDS else row[name] for name in names}
        )
    except ValidationError as error:
        raise TrimaranError(f"store row {row['id']} is damaged: {first_error(error)}") from None
    except (ValueError, TypeError) as error:
        raise TrimaranError(f"store row {row['id']} is damaged: {error}") from None
