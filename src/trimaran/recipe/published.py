"""PublishedTable: one published table that a recipe repeats, and the question that it asks."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from trimaran.nouns.columns import BY_NAME
from trimaran.nouns.noun import Noun


class PublishedTable(Noun):
    """A published table: which rows of a packaged table it is, and the question that it asks.

    `where` chooses rows by columns (`{source = "004_c1a2cf81af8065a2", table = "T11"}`); a list of values takes any
    of them. `compares` are the columns by whose values the answer is told.
    """

    name: str = Field(pattern=r"^[\w.-]{1,60}$")
    question: str = Field(min_length=1)
    compares: tuple[str, ...] = Field(min_length=1)
    packaged: str = "seeds"
    where: dict[str, str | tuple[str, ...]]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in (*self.compares, *self.where):
            if name not in BY_NAME:
                raise ValueError(f"{name!r} is no column of the table contract: see trimaran.nouns.columns")
        return self
