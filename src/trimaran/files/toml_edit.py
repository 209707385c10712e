"""Values set in the text of a TOML file as it stands: comments, order and everything else are kept."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

# Where a value stands: names of tables, numbers within arrays of tables, and the key.
Path = tuple[str | int, ...]
Scalar = str | int | float | bool
Value = Scalar | Mapping[str, Scalar] | Sequence[str]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"""(\s*((?:[\w-]+|"[^"\n]*"|'[^'\n]*')(?:\s*\.\s*(?:[\w-]+|"[^"\n]*"|'[^'\n]*'))*)\s*=\s*)(.*)""")
_VALUE = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^\s,#}\]]+)"""


def set_values(text: str, values: Sequence[tuple[Path, Value]]) -> str | None:
    """The text with each value in the place of what stood there, or as a new line of its table.

    None where the file is written in a form that this cannot follow: the caller then writes the whole anew.
    """
    changed = text
    for path, value in values:
        lines = _set(changed.split("\n"), path, value)
        if lines is None:
            return None
        changed = "\n".join(lines)
    try:
        correct = tomllib.loads(changed) == with_values(tomllib.loads(text), values)
    except ValueError:
        return None
    return changed if correct else None


def with_values(table: dict[str, Any], values: Sequence[tuple[Path, Value]]) -> dict[str, Any]:
    """The same of a table that was read: what the text must say afterwards. An index beyond the end appends."""
    changed: dict[str, Any] = _copied(table)
    for path, value in values:
        inner: Any = changed
        for step, following in pairwise(path):
            if isinstance(step, int) and step == len(inner):
                inner.append({})
            elif isinstance(step, str):
                inner.setdefault(step, [] if isinstance(following, int) else {})
            inner = inner[step]
        inner[path[-1]] = dict(value) if isinstance(value, Mapping) else value
    return changed


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _set(lines: list[str], path: Path, value: Value) -> list[str] | None:
    """The lines with one value set; None where its table is not found."""
    table, key = path[:-1], str(path[-1])
    here: Path = ()
    counts: dict[str, int] = {}
    insert_at: int | None = 0 if not table else None
    for number, line in enumerate(lines):
        if header := _HEADER.fullmatch(line):
            here = _path_of(header, counts)
            if here == table:
                insert_at = number + 1
            continue
        stated = _KEY.fullmatch(line)
        if stated is None:
            continue
        at = (*here, *_names(stated[2]))
        if at == path:
            return _replaced(lines, number, stated[1] + _written(value), stated[3])
        if at == table and stated[3].lstrip().startswith("{"):
            inside = re.compile(rf"([{{,]\s*{re.escape(key)}\s*=\s*){_VALUE}")
            changed, count = inside.subn(lambda found: found[1] + _written(value), stated[3], count=1)
            if not count:
                changed = re.sub(r"\s*\}", f", {key} = {_written(value)} }}", stated[3], count=1)
            return [*lines[:number], stated[1] + changed, *lines[number + 1 :]]
        if here == table:
            insert_at = number + 1
    if insert_at is None and len(table) == 2 and isinstance(table[1], int) and table[1] == counts.get(str(table[0]), 0):
        # a further table of an array of tables, behind all that there is
        end = ["", f"[[{table[0]}]]", f"{key} = {_written(value)}", ""]
        return [*"\n".join(lines).rstrip("\n").split("\n"), *end]
    if insert_at is None:
        return None
    return [*lines[:insert_at], f"{key} = {_written(value)}", *lines[insert_at:]]


def _replaced(lines: list[str], number: int, stated: str, rest: str) -> list[str] | None:
    """The lines with another value in one of them; what follows the value, a comment, is kept."""
    old = re.match(rf"(?:\{{[^}}]*\}}|{_VALUE})", rest)
    return None if old is None else [*lines[:number], stated + rest[old.end() :], *lines[number + 1 :]]


def _path_of(header: re.Match[str], counts: dict[str, int]) -> Path:
    """The table that a header opens; `counts` has how many of each array of tables there were."""
    names = _names(header[2])
    path: list[str | int] = []
    for place, name in enumerate(names, 1):
        path.append(name)
        whole = ".".join(names[:place])
        if header[1] == "[[" and place == len(names):
            counts[whole] = counts.get(whole, 0) + 1
        if whole in counts:
            path.append(counts[whole] - 1)
    return tuple(path)


def _names(dotted: str) -> list[str]:
    return [name.strip("\"'") for name in re.findall(r"""[\w-]+|"[^"]*"|'[^']*'""", dotted)]


def _written(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_written(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, int | float):
        return f"{value:.10g}"
    return "[" + ", ".join(map(_written, value)) + "]"
