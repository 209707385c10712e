"""The published tables that a recipe repeats: by name, and predicted at their full size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimaran.api import predict
from trimaran.cost.table.predict_table import GroupScore, PredictedRow, score_groups
from trimaran.files.row_table import published_table
from trimaran.nouns.noun import TrimaranError
from trimaran.recipe.published import PublishedTable
from trimaran.recipe.recipe import Recipe


@dataclass(frozen=True)
class PredictedTable:
    """A published table with the prediction of every row, and how good they are."""

    published: PublishedTable
    header: tuple[str, ...]
    rows: list[PredictedRow]
    scores: list[GroupScore]


def predict_published(recipe: Recipe, calibration: str | None = None) -> list[PredictedTable]:
    """Every published table of a recipe, predicted and scored.

    `calibration` is a file, or `none` for the priors; without it the shipped one of each row's cluster and stack
    applies. Raises TrimaranError where the recipe has no tables.
    """
    if not recipe.tables:
        raise TrimaranError(
            f"recipe {recipe.name} names no published tables for predict to answer: add [[tables]], or plan the recipe"
        )
    tables = []
    for published in chosen_tables(recipe):
        table = published_table(published)
        rows = predict(table, calibration=calibration)
        tables.append(PredictedTable(published, table.header, rows, score_groups(rows)))
    return tables


def chosen_tables(recipe: Recipe, names: Sequence[str] = ()) -> list[PublishedTable]:
    """The recipe's tables of these names, all of them where none is named. Raises TrimaranError for a wrong name."""
    if not recipe.tables:
        raise TrimaranError(f"recipe {recipe.name} names no published tables: add [[tables]], or leave --scale out")
    known = {table.name: table for table in recipe.tables}
    for name in names:
        if name not in known:
            raise TrimaranError(f"--table {name!r} is not of {recipe.name}: it is one of {', '.join(known)}")
    return [known[name] for name in names] or list(recipe.tables)
