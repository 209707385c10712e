"""Conditions on stored rows, as a person types them: `status=ok`, `sec_per_it<120`, `notes~NUMA`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from trimaran.nouns.columns import BY_NAME, Cell, parse_cell
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError, meant

Condition = Callable[[Measurement], bool]

_CONDITION = re.compile(r"\s*(\w+)\s*(!=|<=|>=|=|<|>|~)(.*)", re.DOTALL)
_ORDER: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# Fields that only the harness fills, which a person may want to select by.
_HARNESS = ("trial_key", "recipe", "code_version", "machine", "created_at")


def parse_condition(text: str) -> Condition:
    """A condition on one column. An empty value stands for a blank cell; `~` asks for a part of a text.

    A blank cell is in no order: `sec_per_it<120` leaves out rows that were not timed.
    Raises TrimaranError naming what cannot be read.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise TrimaranError(f"condition {text!r} is not COLUMN OPERATOR VALUE: write it as status=ok or sec_per_it<120")
    name, sign, text_value = match[1], match[2], match[3].strip()
    if sign == "~":
        _value(name, "")  # a part of a word need be none of its column
        return lambda row: text_value.lower() in _text(_cell(row, name)).lower()
    value = _value(name, text_value)
    if sign in ("=", "!="):
        return lambda row: (_cell(row, name) == value) is (sign == "=")
    if not isinstance(value, int | float):
        raise TrimaranError(f"condition {text!r} orders by {name}, which is not a number: use =, != or ~")
    compare = _ORDER[sign]
    return lambda row: _ordered(compare, _cell(row, name), value)


def sort_key(name: str) -> Callable[[Measurement], tuple[bool, float, str]]:
    """Order by a column, blank cells last; numbers as numbers, words as words."""
    _value(name, "")

    def key(row: Measurement) -> tuple[bool, float, str]:
        cell = _cell(row, name)
        number = float(cell) if isinstance(cell, int | float) else 0.0
        return cell is None, number, cell if isinstance(cell, str) else ""

    return key


def _ordered(compare: Callable[[float, float], bool], cell: Cell, value: float) -> bool:
    return isinstance(cell, int | float) and compare(cell, value)


def _text(cell: Cell) -> str:
    return "" if cell is None else str(cell)


def _cell(row: Measurement, name: str) -> Cell:
    cell: Cell = getattr(row, name)
    return cell


def _value(name: str, text: str) -> Cell:
    if name in _HARNESS:
        return text or None
    column = BY_NAME.get(name)
    if column is None:
        raise TrimaranError(f"{name!r} is not a column: {meant(name, (*BY_NAME, *_HARNESS))}")
    if text == "":
        return None
    try:
        return parse_cell(column, text)
    except ValueError as error:
        raise TrimaranError(f"condition on {error}") from None
