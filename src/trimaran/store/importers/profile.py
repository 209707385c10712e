"""Import profile: what a document or a log does not state, given by the user as a TOML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path

from pydantic import Field, field_validator

from trimaran.files.catalogue import CATALOG, catalogue_names, validate
from trimaran.files.row_nouns import implied_cells
from trimaran.files.user_file import read_toml
from trimaran.nouns.columns import BY_NAME, Cell, parse_cell
from trimaran.nouns.noun import Noun, TrimaranError, meant

# A calculator whose factor follows from the row's recompute: `megatron_eq3` stands for _k4 or _k3.
FORMULA_FAMILIES = ("megatron_eq3", "2kN")

Cells = dict[str, str | int | float]


def typed_cells(stated: Mapping[str, str | int | float]) -> dict[str, Cell]:
    """Stated cells, checked against the table contract, and what follows from a model or layout among them.

    Raises ValueError naming the column.
    """
    typed: dict[str, Cell] = {}
    for name, value in stated.items():
        column = BY_NAME.get(name)
        if column is None:
            raise ValueError(f"{name!r} is not a column of the table contract: {meant(name, BY_NAME)}")
        is_family = name == "flops_formula" and value in FORMULA_FAMILIES
        typed[name] = value if is_family else parse_cell(column, str(value))
    try:
        return implied_cells(typed) | typed
    except TrimaranError as error:
        raise ValueError(str(error)) from None


class _Statements(Noun):
    """Cells that hold where a row prints none, and how printed words are read.

    `columns` maps a printed heading to a column (an empty one: not read); `words` a printed word
    of a heading to what it stands for; `sizes` the Size that a row prints to cells.
    """

    set: Cells = Field(default_factory=dict)
    columns: dict[str, str] = Field(default_factory=dict)
    words: dict[str, dict[str, str]] = Field(default_factory=dict)
    sizes: dict[str, Cells] = Field(default_factory=dict)

    @field_validator("set")
    @classmethod
    def _check_set(cls, cells: Cells) -> Cells:
        typed_cells(cells)
        return cells

    @field_validator("sizes")
    @classmethod
    def _check_sizes(cls, sizes: dict[str, Cells]) -> dict[str, Cells]:
        for cells in sizes.values():
            typed_cells(cells)
        return sizes

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: dict[str, str]) -> dict[str, str]:
        for heading, name in columns.items():
            if name and name not in BY_NAME:
                raise ValueError(f"{heading!r} is mapped to {name!r}, which is not a column of the table contract")
        return columns


class TableProfile(_Statements):
    """What holds for some tables of a document, counted from 1."""

    numbers: tuple[int, ...]
    gbs_per_dp: int | None = Field(default=None, gt=0, description="global batch of each replica")
    infer_layers: bool = Field(default=False, description="layers from TFLOPs and Sec/it by flops_formula")


class RowProfile(Noun):
    """What holds for one row, and why: it wins over what is printed, and the row's notes say so."""

    table: int
    row: str
    set: Cells = Field(default_factory=dict)
    why: str

    @field_validator("set")
    @classmethod
    def _check_set(cls, cells: Cells) -> Cells:
        typed_cells(cells)
        return cells


class Profile(_Statements):
    """All that is stated about one document.

    `title` is its first heading and `table_count` the number of its tables, by which it is recognised:
    statements about the fourth table must not meet another version of the document.
    """

    name: str = ""
    title: str = ""
    table_count: int | None = Field(default=None, gt=0)
    year: int | None = Field(default=None, ge=1990, le=2200, description="year of dates printed without one")
    table: tuple[TableProfile, ...] = ()
    row: tuple[RowProfile, ...] = ()

    def tables(self, number: int) -> list[TableProfile]:
        """The statements about one table, in the profile's order."""
        return [table for table in self.table if number in table.numbers]

    def rows(self, number: int, row: str) -> list[RowProfile]:
        """The statements about one row."""
        return [stated for stated in self.row if stated.table == number and stated.row == row]


def load_profile(name_or_path: str) -> Profile:
    """A Profile by catalogue name or TOML file.

    Raises TrimaranError where there is none of that name, or naming the file and the field that is wrong.
    """
    if name_or_path in catalogue_names("imports"):
        return _parsed(CATALOG / "imports" / f"{name_or_path}.toml", name_or_path)
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise TrimaranError(
            f"profile {name_or_path!r} is not in the catalogue: it has {', '.join(catalogue_names('imports'))}; "
            f"a file's path ends in .toml"
        )
    return _parsed(path, name_or_path)


def profile_for(title: str) -> Profile | None:
    """The shipped profile of the document with that first heading."""
    wanted = " ".join(title.split())
    return next((p for p in map(load_profile, catalogue_names("imports")) if p.title and p.title == wanted), None)


def filled_in(template: str, cells: Mapping[str, Cell]) -> str:
    """`L{layers}-H{hidden}` with the row's own cells; only names of columns are looked up."""
    return re.sub(r"\{(\w+)\}", lambda match: str(cells.get(match[1], match[0])), template)


def _parsed(path: Path | Traversable, name: str) -> Profile:
    source = f"profile {name}"
    return validate(Profile, {"name": name, **read_toml(path, source)}, source)
