"""Tables of the table contract: read a CSV, check every cell of it, and write rows as one."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from trimaran.files.catalogue import CATALOG, write_atomically
from trimaran.files.row_nouns import implied_cells
from trimaran.files.user_file import TABLE_BYTES, read_text
from trimaran.nouns.columns import BY_NAME, COLUMNS, FIGURES, FURTHER_COLUMNS, Cell, missing_required, parse_cell
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.nouns.spoken.printed import ended_as, word_elsewhere
from trimaran.nouns.text import quoted, spreadsheet_cell
from trimaran.recipe.published import PublishedTable

SEEDS = "seeds"


# Of trainings that state none: Megatron's scripts and torchtitan's pipelines begin with a micro-batch of one sequence,
# and most tables that name no vocabulary are of GPT-2's.
_USUAL: Mapping[str, int] = {"mbs": 1, "vocab": 50257}


@dataclass(frozen=True)
class Row:
    """One line of a table: its cells as they stand, and the Measurement or the reason there is none.

    `supposed` is the row with what is usual of the columns `assumed`, where these are all that it leaves out, and
    without measured figures that cannot be read: good enough to be answered, and never kept or learned from. `readings`
    say which of its words were read as which.
    """

    number: int
    cells: dict[str, str]
    measurement: Measurement | None
    error: str | None
    supposed: Measurement | None = None
    assumed: tuple[str, ...] = ()
    readings: tuple[str, ...] = ()

    @property
    def answerable(self) -> Measurement | None:
        """What a prediction may take the row for."""
        return self.measurement or self.supposed


@dataclass(frozen=True)
class Table:
    """A table as read: header in its order, rows, unknown columns included."""

    header: tuple[str, ...]
    rows: tuple[Row, ...]
    source: str = ""

    @property
    def measurements(self) -> list[Measurement]:
        """The rows that could be read."""
        return [row.measurement for row in self.rows if row.measurement is not None]


def read_table(path: str | Path) -> Table:
    """Read a CSV of the table contract.

    A bad cell is named by row and column in that row's `error`, and the other rows go on.
    Raises TrimaranError when the file cannot be read or lacks a required column.
    """
    if not Path(path).suffix and not os.path.lexists(path):
        raise TrimaranError(
            f"table {path} is neither a file nor a table that ships: those are {', '.join(packaged_tables())}"
        )
    text = read_text(path, f"table {path}", TABLE_BYTES, "export it as CSV in UTF-8")
    return parse_table(text, str(path))


def packaged_table(name: str = SEEDS) -> Table:
    """A table of published measurements that Trimaran ships, by name.

    Raises TrimaranError where there is none of that name.
    """
    entry = CATALOG / "measurements" / f"{name}.csv"
    if not entry.is_file():
        raise TrimaranError(f"packaged table {name!r} does not exist: it is one of {', '.join(packaged_tables())}")
    return parse_table(entry.read_text(encoding="utf-8"), name)


def published_table(table: PublishedTable) -> Table:
    """The packaged rows of a published table, in their order. Raises TrimaranError where there are none."""
    wanted = {name: {value} if isinstance(value, str) else set(value) for name, value in table.where.items()}
    whole = packaged_table(table.packaged)
    rows = tuple(row for row in whole.rows if all(row.cells.get(name, "") in values for name, values in wanted.items()))
    if not rows:
        raise TrimaranError(f"tables.{table.name}: no row of {table.packaged} has {table.where}: correct tables.where")
    return Table(whole.header, rows, f"{table.packaged}, {table.name}")


@cache
def packaged_tables() -> tuple[str, ...]:
    """Names of the tables of measured runs that Trimaran ships."""
    folder = CATALOG / "measurements"
    names = (entry.name.removesuffix(".csv") for entry in folder.iterdir() if entry.name.endswith(".csv"))
    return tuple(sorted(name for name in names if not name.startswith("micro_") and name != "seeds_corrections"))


def parse_table(text: str, source: str) -> Table:
    """Parse CSV text of the table contract; see read_table."""
    header, lines = header_and_lines(text, source)
    rows = tuple(_parse_row(number, header, cells) for number, cells in lines)
    return Table(header, rows, source)


def header_and_lines(text: str, source: str) -> tuple[tuple[str, ...], Iterator[tuple[int, list[str]]]]:
    """The columns of a CSV of the table contract, and its lines one by one: number and cells, no blank ones.

    Raises TrimaranError where the text is no CSV or lacks a required column.
    """
    lines = _csv_lines(text, source)
    first = next((cells for cells in lines if any(cell.strip() for cell in cells)), None)
    if first is None:
        raise TrimaranError(f"table {source} is empty: its first line must name the columns")
    header = tuple(name.strip() for name in first)
    if duplicate := next((name for name in header if header.count(name) > 1), None):
        raise TrimaranError(f"table {source} has column {duplicate!r} twice: rename one")
    if missing := missing_required(header):
        hint = "; its cells must be separated by commas" if len(header) == 1 else ""
        raise TrimaranError(f"table {source} lacks column {missing[0]!r}: required are {_required_names()}{hint}")
    return header, ((number, cells) for number, cells in enumerate(lines, start=1) if any(cells))


def _csv_lines(text: str, source: str) -> Iterator[list[str]]:
    try:
        # what old programs of Macs write ends its lines by carriage returns alone
        yield from csv.reader(io.StringIO(text.replace("\r\n", "\n").replace("\r", "\n")), strict=True)
    except csv.Error as error:
        raise TrimaranError(f"table {source} is not valid CSV: {error}") from None


def stated_cells(number: int, header: Sequence[str], cells: Sequence[str]) -> dict[str, Cell]:
    """The typed cells that one line fills, in the contract's columns. Raises ValueError with what is wrong in it.

    A measured figure's cell that says how the run ended fills the status, where the line states none.
    """
    raw = _by_column(number, header, cells)
    try:
        return _typed_cells(raw)
    except ValueError as error:
        raise ValueError(f"row {number}: {error}") from None


def _by_column(number: int, header: Sequence[str], cells: Sequence[str]) -> dict[str, str]:
    """The cells that are not blank, as printed, by their columns; how a run ended under `status`."""
    if len(cells) != len(header):
        raise ValueError(f"row {number} has {len(cells)} cells, the header {len(header)}: a cell is missing or shifted")
    pairs = zip(header, cells, strict=True)
    filled = {name: text for name, text in pairs if name in BY_NAME and text.strip()}
    endings = {name: ended for name in FIGURES if (ended := ended_as(filled.get(name, "").strip()))}
    status = filled.get("status", "").strip().lower()
    if endings and (not status or status in endings.values()):
        left = {name: text for name, text in filled.items() if name not in endings}
        return left | {"status": next(iter(endings.values()))}
    return filled


def _typed_cells(raw: Mapping[str, str]) -> dict[str, Cell]:
    cells = {name: parse_cell(BY_NAME[name], text) for name, text in raw.items()}
    return {name: value for name, value in cells.items() if value is not None}


def _without_unread_figures(raw: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The cells without measured figures that cannot be read, and what is wrong with the first of these.

    A question with a figure that nobody can read is the same question as without it.
    """
    left, wrong = dict(raw), ""
    for name in FIGURES:
        try:
            parse_cell(BY_NAME[name], raw.get(name, ""))
        except ValueError as error:
            del left[name]
            wrong = wrong or str(error)
    return left, wrong


def misspelt_columns(header: Sequence[str]) -> list[str]:
    """A sentence for each unknown column that resembles a missing one: perhaps it was not meant to pass through."""
    missing = [name for name in BY_NAME if name not in header]
    unknown = ((name, get_close_matches(name, missing, n=1, cutoff=0.8)) for name in header if name not in BY_NAME)
    return [
        f"column {name!r} is not known and passes through unread, and column {near[0]!r} is missing: is it that one?"
        for name, near in unknown
        if near
    ]


def _required_names() -> str:
    return ", ".join(column.name for column in COLUMNS if column.required)


def _parse_row(number: int, header: Sequence[str], cells: Sequence[str]) -> Row:
    raw = dict(zip(header, cells, strict=False))
    try:
        printed, unread = _without_unread_figures(_by_column(number, header, cells))
        stated = _typed_cells(printed)
    except ValueError as error:
        prefix = f"row {number}"
        reason = str(error) if str(error).startswith(prefix) else f"{prefix}: {error}"
        return Row(number, raw, None, reason)
    readings = tuple(
        f"{name} is {quoted(text)}: read as {stated[name]}"
        for name, text in printed.items()
        if word_elsewhere(name, text) is not None
    )
    try:
        values = {name: column.default for name, column in BY_NAME.items()} | implied_cells(stated) | stated
        empty = tuple(column.name for column in COLUMNS if column.required and values[column.name] is None)
        if not empty and not unread:
            return Row(number, raw, Measurement.model_validate(values), None, readings=readings)
        reason = f"row {number}: " + (unread or f"{empty[0]} is empty, and it has no default: fill it in")
        if not set(empty) <= set(_USUAL):
            return Row(number, raw, None, reason)
        supposed = Measurement.model_validate(values | {name: _USUAL[name] for name in empty})
        return Row(number, raw, None, reason, supposed, empty, readings)
    except ValidationError as error:
        return Row(number, raw, None, f"row {number}: {first_error(error)}")
    except (ValueError, TrimaranError) as error:
        return Row(number, raw, None, f"row {number}: {error}")


def write_table(path: str | Path, measurements: Iterable[Measurement]) -> int:
    """Write measurements as CSV of the table contract, whole or not at all; how many. No figure is an empty cell.

    They are gone through twice.
    """
    text, number = _formatted(measurements)
    write_atomically(path, text)
    return number


def _formatted(measurements: Iterable[Measurement]) -> tuple[str, int]:
    behind = [column.name for column in FURTHER_COLUMNS]
    filled: set[str] = set()
    for row in measurements:
        filled |= {name for name in behind if getattr(row, name) is not None}
        if len(filled) == len(behind):
            break
    names = [*(column.name for column in COLUMNS), *(name for name in behind if name in filled)]
    out, number = io.StringIO(), 0
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in measurements:
        writer.writerow([spreadsheet_cell(getattr(row, name)) for name in names])
        number += 1
    return out.getvalue(), number
