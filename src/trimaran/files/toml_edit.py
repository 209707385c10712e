"""Values set in the text of a TOML file as it stands: comments, order and everything else are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import tomlkit

# Where a value stands: names of tables, numbers within arrays of tables, and the key.
Path = tuple[str | int, ...]
Scalar = str | int | float | bool
Value = Scalar | Mapping[str, Scalar] | Sequence[str]


def set_values(text: str, values: Sequence[tuple[Path, Value]]) -> str:
    """The text with each value in the place of what stood there, or as a new line of its table."""
    document = tomlkit.parse(text)
    for path, value in values:
        written: Any = value
        if isinstance(value, Mapping):
            written = tomlkit.inline_table()
            written.update(value)
        _set(document, path, written, tomlkit.table, tomlkit.aot)
    return document.as_string()


def with_values(table: dict[str, Any], values: Sequence[tuple[Path, Value]]) -> dict[str, Any]:
    """The same of a table that was read: what the text must say afterwards. An index beyond the end appends."""
    changed = copy.deepcopy(table)
    for path, value in values:
        _set(changed, path, dict(value) if isinstance(value, Mapping) else value, dict, list)
    return changed


def _set(inner: Any, path: Path, value: Any, new_table: Callable[[], Any], new_array: Callable[[], Any]) -> None:
    """Set one value, in tables that are made where there are none."""
    for step, following in pairwise(path):
        if isinstance(step, int) and step == len(inner):
            inner.append(new_table())
        elif isinstance(step, str) and step not in inner:
            inner[step] = new_array() if isinstance(following, int) else new_table()
        inner = inner[step]
    inner[path[-1]] = value
