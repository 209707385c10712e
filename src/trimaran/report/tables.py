"""Tables: rows of plain values as console table, Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trimaran.nouns.text import figure, markdown_text, printable, spreadsheet_cell

Format = Literal["table", "json", "csv", "markdown", "latex"]
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Field:
    """One column of a printed table: the record's key, its title, and how a person reads its value.

    `spec` is a format specification (`.2f`); `suffix` a unit that is printed behind the value.
    JSON and CSV carry the value itself.
    """

    key: str
    title: str
    spec: str = ""
    suffix: str = ""
    left: bool = False

    def show(self, record: Record) -> str:
        """The value as one line of text; an absent one is blank.

        What is not printable becomes a space: rows come from files of others, and must not steer a terminal.
        """
        value = record.get(self.key)
        if value is None:
            return ""
        if isinstance(value, float) and self.spec:
            return f"{figure(value, self.spec)}{self.suffix}"
        return printable(f"{value}{self.suffix}").replace("\n", " ").replace("\t", " ")


def render(records: Sequence[Record], fields: Sequence[Field], form: Format) -> str:
    """All records in one of the formats; `fields` choose and order the columns of the printed ones.

    JSON and CSV carry every key of the records; the printed forms only the fields with a value somewhere.
    """
    if form == "json":
        return json.dumps(list(records), indent=2, allow_nan=False)
    if form == "csv":
        return _csv(records)
    shown = [field for field in fields if any(field.show(record) for record in records)]
    return {"markdown": _markdown, "latex": _latex, "table": _console}[form](records, shown)


def _csv(records: Sequence[Record]) -> str:
    keys = list(dict.fromkeys(key for record in records for key in record))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(keys)
    for record in records:
        cells = (record.get(key) for key in keys)
        plain = ("" if c is None else json.dumps(c) if isinstance(c, dict | list) else c for c in cells)
        writer.writerow([spreadsheet_cell(cell) for cell in plain])
    return out.getvalue().rstrip("\n")


def _markdown(records: Sequence[Record], fields: Sequence[Field]) -> str:
    texts = [[markdown_text(text) for text in row] for row in _texts(records, fields)]
    widths = [max(3, len(field.title), *(len(row[i]) for row in texts)) for i, field in enumerate(fields)]
    lines = ["| " + " | ".join(_pad(f.title, w, f.left) for f, w in zip(fields, widths, strict=True)) + " |"]
    rules = (":" + "-" * (w - 1) if f.left else "-" * (w - 1) + ":" for f, w in zip(fields, widths, strict=True))
    lines.append("| " + " | ".join(rules) + " |")
    for row in texts:
        cells = (_pad(text, w, f.left) for text, f, w in zip(row, fields, widths, strict=True))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


_LATEX = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"})


def _latex(records: Sequence[Record], fields: Sequence[Field]) -> str:
    """A tabular with the rules of the package booktabs."""

    def line(cells: Iterable[str]) -> str:
        # the backslash goes first, or those that the other characters get would be written out too
        return " & ".join(
            cell.replace("\\", "\0").translate(_LATEX).replace("\0", r"\textbackslash{}") for cell in cells
        )

    columns = "".join("l" if field.left else "r" for field in fields)
    body = [line(field.show(record) for field in fields) + r" \\" for record in records]
    titles = line(field.title for field in fields) + r" \\"
    return "\n".join(
        [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", titles, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    )


def _console(records: Sequence[Record], fields: Sequence[Field]) -> str:
    texts = _texts(records, fields)
    widths = [max(len(field.title), *(len(row[i]) for row in texts)) for i, field in enumerate(fields)]
    lines = ["  ".join(_pad(f.title, w, f.left) for f, w in zip(fields, widths, strict=True)).rstrip()]
    lines.append("  ".join("-" * w for w in widths))
    for row in texts:
        lines.append("  ".join(_pad(t, w, f.left) for t, f, w in zip(row, fields, widths, strict=True)).rstrip())
    return "\n".join(lines)


def _texts(records: Sequence[Record], fields: Sequence[Field]) -> list[list[str]]:
    """Every cell as a person reads it; equal texts are one object, since a long table says the same ones over."""
    seen: dict[str, str] = {}
    return [[seen.setdefault(text, text) for text in (field.show(record) for field in fields)] for record in records]


def _pad(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)
