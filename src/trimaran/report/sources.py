"""What a report is made of: stores, tables of the contract, or a plan's JSON, told apart by their endings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimaran.files.row_table import read_table
from trimaran.files.user_file import MIB, read_json
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.files import RunFile
from trimaran.report.page.content import Content
from trimaran.report.page.measured import measured_content
from trimaran.report.page.planned import plan_content
from trimaran.store import Store

PLAN_ENDING, TABLE_ENDING = ".json", ".csv"
# A plan of ten thousand layouts, the most that is ranked, is smaller.
PLAN_BYTES = 64 * MIB


def measured_rows(path: Path, recipe: str | None = None) -> list[Measurement]:
    """The rows of a store, or of a CSV of the table contract. Raises TrimaranError where it cannot be read."""
    if path.is_dir():
        raise TrimaranError(
            f"{path} is a folder without {RunFile.LOG} of a training: give a store, a table, a plan or runs/NAME/train"
        )
    if path.suffix.lower() == PLAN_ENDING:
        raise TrimaranError(f"{path}: a plan is shown as a page or a figure: give -o {path.with_suffix('.html')}")
    if path.suffix.lower() == TABLE_ENDING:
        table = read_table(path)
        if refused := next((row for row in table.rows if row.error), None):
            raise TrimaranError(f"table {path}: {refused.error}")
        return [row for row in table.measurements if recipe in (None, row.recipe)]
    with Store(path, create=False) as store:
        return store.measurements(recipe=recipe)


def rows_of_each(paths: Sequence[Path], recipe: str | None = None) -> list[list[Measurement]]:
    """The rows of each file. Raises TrimaranError where one cannot be read, and where none has a row to show."""
    rows = [measured_rows(path, recipe) for path in paths]
    if any(rows):
        return rows
    files = ", ".join(map(str, paths))
    known = {row.recipe for path in paths for row in measured_rows(path)} if recipe is not None else set()
    if not known:
        raise TrimaranError(f"{files}: there are no rows to report: measure, import or add some")
    named = ", ".join(sorted(name for name in known if name))
    there = f"the recipes there are {named}" if named else "they name no recipe, so leave it out"
    raise TrimaranError(f"--recipe {recipe}: no row of {files} is of it: {there}")


def content_of(paths: Sequence[Path], recipe: str | None = None) -> Content:
    """What a page or a figure shows of these files: one plan, or measured rows side by side.

    Raises TrimaranError for a plan beside other files or a recipe, a file that cannot be read, or no rows.
    """
    if any(path.suffix.lower() == PLAN_ENDING for path in paths):
        if len(paths) > 1:
            raise TrimaranError(f"{len(paths)} files are given and one is a plan: report a plan by itself")
        if recipe is not None:
            raise TrimaranError(
                f"--recipe {recipe} chooses among measured rows, and {paths[0]} is a plan: leave it out"
            )
        return plan_content(_read_plan(paths[0]))
    return measured_content(dict(zip(_names(paths), rows_of_each(paths, recipe), strict=True)))


def _read_plan(path: Path) -> dict[str, object]:
    written = "write it with `trimaran plan ... --format json`"
    plan = read_json(path, f"plan {path}", PLAN_BYTES, written)
    if not isinstance(plan, dict):
        raise TrimaranError(f"plan {path} holds no plan: {written}")
    return plan


def _names(paths: Sequence[Path]) -> list[str]:
    """A short name for each file; `runs/laptop/store.sqlite` is called laptop, since every store is called store."""
    short = [path.parent.name if path.stem == "store" and path.parent.name else path.stem for path in paths]
    return [name if short.count(name) == 1 else str(path) for name, path in zip(short, paths, strict=True)]
