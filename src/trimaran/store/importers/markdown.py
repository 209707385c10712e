"""Markdown: its tables, each with the headings and the text above it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_HEADING = re.compile(r"(#{1,6})\s")
_RULE_CHARACTERS = frozenset(" \t:|-")
_CELL_END = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class PrintedTable:
    """One table as printed.

    `headings` is the path of headings, `text` the lines between it and the table (or heading)
    before, `section_text` all lines since the last heading, `preamble` those of the sections
    before the first table. Lines of code blocks are in `code` alone.
    """

    number: int
    headings: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: tuple[str, ...]
    section_text: tuple[str, ...]
    preamble: tuple[str, ...]
    code: tuple[str, ...]


@dataclass
class _Reader:
    headings: list[tuple[int, str]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    section_text: list[str] = field(default_factory=list)
    preamble: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    tables: list[PrintedTable] = field(default_factory=list)

    def heading(self, level: int, title: str) -> None:
        self.headings = [(depth, text) for depth, text in self.headings if depth < level]
        self.headings.append((level, title))
        if not self.tables:
            self.preamble += self.section_text
        self.text, self.section_text, self.code = [], [], []

    def line(self, text: str) -> None:
        self.text.append(text)
        self.section_text.append(text)

    def table(self, lines: list[str]) -> None:
        header, *rows = (_split(line) for line in lines if not _is_rule(line))
        self.tables.append(
            PrintedTable(
                number=len(self.tables) + 1,
                headings=tuple(text for _, text in self.headings),
                header=header,
                rows=tuple(row for row in rows if any(row)),
                text=tuple(self.text),
                section_text=tuple(self.section_text),
                preamble=tuple(self.preamble),
                code=tuple(self.code),
            )
        )
        self.text, self.code = [], []


def read_tables(text: str) -> list[PrintedTable]:
    """All tables of a Markdown text, in order; blank rows are left out."""
    reader = _Reader()
    lines = text.split("\n")
    fenced, at = False, 0
    while at < len(lines):
        line = lines[at]
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced:
            reader.code.append(line)
        elif heading := _HEADING.match(line):
            reader.heading(len(heading[1]), _title(line))
        elif "|" in line and at + 1 < len(lines) and _is_rule(lines[at + 1]):
            end = next((i for i in range(at, len(lines)) if "|" not in lines[i]), len(lines))
            reader.table(lines[at:end])
            at = end
            continue
        else:
            reader.line(line)
        at += 1
    return reader.tables


def title_of(text: str) -> str:
    """The first heading, or an empty text."""
    return next((_title(line) for line in text.split("\n") if _HEADING.match(line)), "")


def _title(line: str) -> str:
    return " ".join(line.strip().strip("#").split())


def _is_rule(line: str) -> bool:
    return "|" in line and "-" in line and _RULE_CHARACTERS.issuperset(line)


def _split(line: str) -> tuple[str, ...]:
    cells = _CELL_END.split(line.strip().removeprefix("|"))
    if not cells[-1].strip():  # behind the closing bar
        cells = cells[:-1]
    return tuple(cell.replace("\\|", "|").strip() for cell in cells)
