"""Noted: what the words of a table's row say of its run, beyond the catalogue names in it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pydantic import Field

from trimaran.nouns.noun import Noun

_NEGATED = re.compile(r"\b(?:no|not|without|non|w/o)[\s-]+(?:\w+[\s.-]+)?$")
_OFF = re.compile(r"^\w*[\s:=(]*(?:off|false|disabled|none)\b")


class Noted(Noun):
    """Words of a row's text, and the catalogue name as which the row is read where its text has them."""

    words: str = Field(min_length=2, description="words that stand together, however they are set apart")
    read_as: str = Field(min_length=1, description="the catalogue name of what ran")

    def said_in(self, text: str) -> bool:
        """Whether a text has the words, and does not deny them: `AsyncTP` and `async-TP` are `async TP`."""
        letters = re.findall(r"[a-z0-9]+", self.words.lower())
        wanted = re.compile(r"(?<![a-z0-9])" + r"[\s._-]*".join(map(re.escape, letters)))
        text = text.lower()
        return any(
            not _NEGATED.search(text[: found.start()]) and not _OFF.match(text[found.end() :])
            for found in wanted.finditer(text)
        )


def first_said(noted: Iterable[Noted], text: str) -> Noted | None:
    """The first entry whose words a text has, or None."""
    return next((each for each in noted if each.said_in(text)), None)
