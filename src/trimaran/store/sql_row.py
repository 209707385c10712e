"""A Measurement as a row of SQL cells, and back."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from pydantic import ValidationError

from trimaran.nouns.columns import ASSUMED
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError, first_error

FIELDS: tuple[str, ...] = tuple(Measurement.model_fields)
_EMPTY = {"step_times_s": "[]", "losses": "[]", "mem_gib_per_rank": "[]", "libraries": "{}", "environment": "{}"}
_JSON_FIELDS = frozenset(_EMPTY)


def quoted(name: str) -> str:
    """A column name as SQL wants it (`table` is a keyword)."""
    return f'"{name}"'


def to_cells(measurement: Measurement) -> list[object]:
    """The cells of one row, in the order of FIELDS."""
    values = vars(measurement)
    return [_json_of(name, values[name]) if name in _JSON_FIELDS else values[name] for name in FIELDS]


def _json_of(name: str, value: Any) -> str:
    return json.dumps(value) if value else _EMPTY[name]


def from_cells(row: sqlite3.Row) -> Measurement:
    """The Measurement in one row; a store of an earlier version, opened only to be read, lacks later columns.

    Raises TrimaranError naming the row that does not hold one.
    """
    stored = dict(zip(row.keys(), row, strict=True))
    # what is as usual is left out: a hundred thousand rows need not hold it again
    stated: dict[str, Any] = {name: stored[name] for name in FIELDS if stored.get(name) is not None}
    stated |= {name: None for name in ASSUMED if name in stored and stored[name] is None}
    try:
        for name, empty in _EMPTY.items():
            if (text := stated.pop(name, empty)) != empty:
                stated[name] = json.loads(text)
        return Measurement.model_validate(stated)
    except ValidationError as error:
        raise TrimaranError(f"store row {row['id']} is damaged: {first_error(error)}") from None
    except (ValueError, TypeError) as error:
        raise TrimaranError(f"store row {row['id']} is damaged: {error}") from None
