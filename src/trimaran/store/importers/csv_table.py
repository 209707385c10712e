"""CSV in the columns of the table contract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trimaran.files.row_nouns import implied_cells
from trimaran.files.row_table import header_and_lines, stated_cells
from trimaran.nouns.columns import BY_NAME, Cell
from trimaran.nouns.noun import TrimaranError
from trimaran.store.importers.document_rows import Reading
from trimaran.store.importers.draft import Draft


def recognises(text: str) -> bool:
    """Whether the first line that is not blank names columns of the contract: a shape or a model, and what was run."""
    names = {name.strip(' \t"') for name in text.lstrip(" \t\n,").split("\n", 1)[0].split(",")}
    return ({"layers", "hidden"} <= names or "model" in names) and not names.isdisjoint({"mbs", "layout_label"})


def read(text: str, given: Mapping[str, Cell], path: Path) -> Reading:
    """The table's rows. A row that states its quality keeps it; the others are examined like a document's.

    Raises TrimaranError where there is no row.
    """
    header, lines = header_and_lines(text, str(path))
    reading = Reading(unread={name for name in header if name not in BY_NAME})
    for number, line in lines:
        try:
            cells = stated_cells(number, header, line)
            implied = implied_cells(cells)
        except ValueError as error:
            reading.refused.append(str(error))
            continue
        except TrimaranError as error:
            reading.refused.append(f"row {number}: {error}")
            continue
        table, row, section = (str(cells.get(name, "")) for name in ("table", "row", "section"))
        draft = Draft(table, row or str(number), section, cells)
        draft.notes += [str(cells["notes"])] if "notes" in cells else []
        draft.fill(implied)
        draft.fill(given)
        reading.drafts.append(draft)
    if not reading.drafts and not reading.refused:
        raise TrimaranError(f"{path} has a header but no rows")
    return reading
