"""A Measurement as a row of SQL cells, and back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from trimaran.nouns.columns import ASSUMED
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError, first_error

FIELDS: tuple[str, ...] = tuple(Measurement.model_fields)
_EMPTY = {"step_times_s": "[]", "losses": "[]", "mem_gib_per_rank": "[]", "libraries": "{}", "environment": "{}"}
_JSON_FIELDS = frozenset(_EMPTY)


_USUAL = object()


def quoted(name: str) -> str:
    """A column name as SQL wants it (`table` is a keyword)."""
    return f'"{name}"'


def to_cells(measurement: Measurement) -> list[object]:
    """The cells of one row, in the order of FIELDS."""
    values = vars(measurement)
    return [json.dumps(values[name]) if name in _JSON_FIELDS else values[name] for name in FIELDS]


def from_cells(row: sqlite3.Row) -> Measurement:
    """The Measurement in one row; a store of an earlier version, opened only to be read, lacks later columns.

    Raises TrimaranError naming the row that does not hold one.
    """
    stored = dict(zip(row.keys(), row, strict=True))
    try:
        return Measurement.model_validate(
            {name: cell for name in FIELDS if (cell := _cell(stored, name)) is not _USUAL}
        )
    except ValidationError as error:
        raise TrimaranError(f"store row {row['id']} is damaged: {first_error(error)}") from None
    except (ValueError, TypeError) as error:
        raise TrimaranError(f"store row {row['id']} is damaged: {error}") from None


def _cell(stored: Mapping[str, Any], name: str) -> Any:
    """The value of one stored cell, or that it is as usual, which a hundred thousand rows need not hold again."""
    if name not in stored:
        return _USUAL
    cell = stored[name]
    if name in _JSON_FIELDS:
        return _USUAL if cell == _EMPTY[name] else json.loads(cell)
    return _USUAL if cell is None and name not in ASSUMED else cell
