"""Noted: what the words of a table's row say of its run, beyond the catalogue names in it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Self

from pydantic import Field, model_validator

from trimaran.nouns.noun import Noun
from trimaran.nouns.text import quoted

_NEGATED = re.compile(r"\b(?:no|not|without|non|w/o)[\s-]+(?:\w+[\s.-]+)?$")
_OFF = re.compile(r"\w*[\s:=(]*(?:off|false|disabled|none)\b")
# Characters beside the words among which a denial is looked for: a cell may be as long as a line of its file.
_NEAR = 40


class Noted(Noun):
    """Words of a row's text, and the catalogue name as which the row is read where its text has them."""

    words: str = Field(min_length=2, description="words that stand together, however they are set apart")
    read_as: str = Field(min_length=1, description="the catalogue name of what ran")
    since: str = Field(
        default="",
        pattern=r"^(\d{4}-\d{2}-\d{2})?$",
        description="the day from which on a row's date says so; empty: any",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not _letters(self.words):
            raise ValueError(f"words is {quoted(self.words)}, which has no letter: state words that a row may have")
        if "/" in self.read_as or self.read_as.endswith(".toml"):
            raise ValueError(f"read_as is {quoted(self.read_as)}, a file: name an entry of the catalogue")
        return self

    def said_in(self, text: str) -> bool:
        """Whether a text has the words, and does not deny them: `AsyncTP` and `async-TP` are `async TP`."""
        return says(self.words, text) is True


def says(words: str, text: str) -> bool | None:
    """Whether a text says the words, however they are set apart, or denies them; None where it has them nowhere."""
    wanted = re.compile(r"(?<![a-z0-9])" + r"[\s._-]{0,3}".join(_letters(words)))
    text = text.lower()
    said = [
        not _NEGATED.search(text, max(0, found.start() - _NEAR), found.start())
        and not _OFF.match(text, found.end(), found.end() + _NEAR)
        for found in wanted.finditer(text)
    ]
    return any(said) if said else None


def _letters(words: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", words.lower())


def first_said(noted: Iterable[Noted], text: str, date: str | None = None) -> Noted | None:
    """The first entry whose words a text of a date (or of a month of it) has, or None."""
    return next((each for each in noted if each.since <= (date or "") and each.said_in(text)), None)
