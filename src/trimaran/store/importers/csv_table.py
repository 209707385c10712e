"""CSV in the columns of the table contract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trimaran.files.row_nouns import implied_cells
from trimaran.files.row_table import parse_table
from trimaran.nouns.columns import BY_NAME, Cell, parse_cell
from trimaran.nouns.noun import TrimaranError
from trimaran.store.importers.document_rows import Reading
from trimaran.store.importers.draft import Draft


def recognises(text: str) -> bool:
    """Whether the first line names columns of the contract."""
    names = {name.strip() for name in text.split("\n", 1)[0].split(",")}
    return {"layers", "hidden", "mbs"} <= names


def read(text: str, given: Mapping[str, Cell], path: Path) -> Reading:
    """The table's rows. A row that states its quality keeps it; the others are examined like a document's."""
    table = parse_table(text, str(path))
    reading = Reading(unread={name for name in table.header if name not in BY_NAME})
    for row in table.rows:
        if row.error is not None:
            reading.refused.append(row.error)
            continue
        stated = {name: row.cells.get(name, "").strip() for name in BY_NAME}
        draft = Draft(stated["table"], stated["row"] or str(row.number), stated["section"])
        draft.cells |= {name: parse_cell(BY_NAME[name], text) for name, text in stated.items() if text}
        draft.notes += [stated["notes"]] if stated["notes"] else []
        draft.fill(implied_cells(draft.cells))
        draft.fill(given)
        reading.drafts.append(draft)
    if not table.rows:
        raise TrimaranError(f"{path} has a header but no rows")
    return reading
