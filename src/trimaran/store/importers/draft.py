"""Draft: a row while it is imported, with what is doubtful in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from trimaran.nouns.columns import ASSUMED, BY_NAME, Cell, check_cell, missing_required
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import first_error

# Qualities that a doubt may give a row, the gravest first: a row carries the gravest of its doubts.
DOUBTS = (
    "misplaced",
    "swapped",
    "inconsistent_layout",
    "inconsistent_gbs",
    "inconsistent_unit",
    "inconsistent_tflops",
    "ambiguous",
    "incomplete",
    "suspect",
    "suspect_mem",
    "estimate",
    "duplicate",
    "repeat",
)

_GIVEN = set(Measurement.model_fields)
_DEFAULTS = {column.name: column.default for column in BY_NAME.values() if column.default is not None}

Accept = Callable[[str], bool]


@dataclass(slots=True)
class Draft:
    """One row: its typed cells, notes in order, doubts, and repairs that were proposed but not made.

    `extra` holds fields that only a log knows (step times, losses, memory by rank).
    `stated_gbs` is a global batch named in the text above a table, evidence against its column. A row of a log
    `leaves_blank` what the log does not state, where one of a table has the contract's default, and `ended` when its
    last step was logged, in seconds by its own clock. `refusal` says why there is no row for what was read.
    """

    table: str = ""
    row: str = ""
    section: str = ""
    cells: dict[str, Cell] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    proposals: list[str] = field(default_factory=list)
    repaired: bool = False
    stated_gbs: int | None = None
    leaves_blank: bool = False
    ended: float | None = None
    refusal: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How a sentence calls the row: `T2 row 4`."""
        return f"{self.table} row {self.row}".strip()

    def number(self, column: str) -> float | None:
        """A numeric cell, or None where it is blank."""
        value = self.cells.get(column)
        return float(value) if isinstance(value, int | float) else None

    def count(self, column: str, default: int | None = None) -> int | None:
        """A whole-number cell, or the default where it is blank."""
        value = self.cells.get(column)
        return value if isinstance(value, int) else default

    def derive(self) -> None:
        """Nodes, devices and DP, where the others give them; a single device is one of each degree."""
        if self.leaves_blank and self.count("devices") == 1:
            self.fill({"dp": 1, "tp": 1, "pp": 1})
        known = not self.leaves_blank or None not in (self.count("tp"), self.count("pp"))
        replica = math.prod(self.count(name, 1) or 1 for name in ("tp", "pp", "cp"))
        per_node, nodes, devices, dp = (self.count(name) for name in ("devices_per_node", "nodes", "devices", "dp"))
        if devices is None and (known or not dp):
            devices = nodes * per_node if nodes and per_node else dp * replica if dp else None
        if dp is None and known and devices and devices % replica == 0:
            dp = devices // replica
        if nodes is None and devices and per_node:
            nodes = -(-devices // per_node)
        self.fill({"devices": devices, "dp": dp, "nodes": nodes})

    def fill(self, cells: Mapping[str, Cell]) -> None:
        """Fill what is still blank; what was printed stays."""
        for name, value in cells.items():
            if self.cells.get(name) is None and value is not None:
                self.cells[name] = value

    def doubt(self, quality: str, sentence: str) -> None:
        """Flag the row."""
        self.doubts.append(quality)
        self.notes.append(sentence)

    def propose(self, quality: str, sentence: str, repair: Mapping[str, Cell], accept: Accept) -> None:
        """Repair cells if the user agrees, else keep them as printed, flagged; either way the row says so."""
        change = ", ".join(f"{name} {_shown(self.cells.get(name))} to {_shown(new)}" for name, new in repair.items())
        if accept(f"{self.name}: {sentence}; correct {change}?"):
            self.cells.update(repair)
            self.repaired = True
            self.notes.append(f"{sentence}; corrected {change}")
            return
        self.proposals.append(f"{self.name}: {sentence}; would correct {change}")
        self.doubt(quality, f"{sentence}; kept as printed")


def finish(draft: Draft, source: str) -> Measurement | str:
    """The Measurement of a draft, or the sentence that says why there is none."""
    if draft.refusal:
        return f"{draft.name}: {draft.refusal}"
    missing = missing_required(name for name, value in draft.cells.items() if value is not None)
    if missing:
        return (
            f"{draft.name}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not stated: "
            f"give a --profile, or --model and --set {missing[0]}=..."
        )
    cells: dict[str, Any] = {"source": source, "section": draft.section, "table": draft.table, "row": draft.row}
    cells |= draft.cells
    blank = [name for name in ASSUMED if draft.leaves_blank and cells.get(name) is None]
    if blank:
        draft.doubt("incomplete", f"not stated: {', '.join(blank)}")
    cells["quality"] = _quality(draft)
    cells["notes"] = "; ".join(dict.fromkeys(note for note in draft.notes if note)) or None
    try:
        stated = {
            name: check_cell(BY_NAME[name], value) if name in BY_NAME else value
            for name, value in cells.items()
            if value is not None
        }
        valid = Measurement.model_validate(_DEFAULTS | stated | dict.fromkeys(blank) | draft.extra)
        # one set of the fields that were given, for all rows: their own would be half of what a row holds
        object.__setattr__(valid, "__pydantic_fields_set__", _GIVEN)
        return valid
    except ValidationError as error:
        return f"{draft.name}: {first_error(error)}"
    except ValueError as error:
        return f"{draft.name}: {error}"


def _quality(draft: Draft) -> str:
    if draft.doubts:
        return min(draft.doubts, key=DOUBTS.index)
    stated = draft.cells.get("quality")
    if isinstance(stated, str) and stated:
        return stated
    return "corrected" if draft.repaired else "ok"


def _shown(value: Cell) -> str:
    if value is None:
        return "blank"
    return f"{value:.10g}" if isinstance(value, float) else str(value)
