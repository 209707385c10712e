"""The short notation of layouts, `dp8,tp4,pp12,mbs2,zero1,recompute-full,bf16`, read; Layout.label writes it."""

from __future__ import annotations

import re

from pydantic import ValidationError

from trimaran.layout.choices import CHOICES
from trimaran.layout.layout import Layout
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.nouns.text import quoted


def _parse_word(word: str) -> tuple[str, dict[str, object]] | None:
    """The choice that one word of the notation states and the fields that it brings, or None where it is no such."""
    matches = ((choice, re.fullmatch(choice.word.pattern, word)) for choice in CHOICES)
    return next(((choice.name, choice.word.reads(match)) for choice, match in matches if match), None)


def stated_fields(text: str) -> dict[str, object]:
    """The fields that a layout in short notation states, `dp8,tp4,pp12,mbs2,zero1,recompute-full,bf16`.

    What a word brings besides its own choice (`fsdp` means ZeRO 3) gives way to a word that states it.
    Raises TrimaranError naming the word that is not understood or states a choice again.
    """
    fields: dict[str, object] = {}
    brought: dict[str, object] = {}
    for word in filter(None, re.split(r"[,\s]+", text.strip().lower())):
        known = _parse_word(word)
        if known is None:
            raise TrimaranError(
                f"layout: {quoted(word)} is not understood; write as dp8,tp4,pp12,mbs2,zero1,recompute-full,bf16"
            )
        name, stated = known
        if name in fields:
            raise TrimaranError(f"layout {quoted(text)}: {word!r} states {name} a second time: leave one of them out")
        fields[name] = stated.pop(name)
        brought |= stated
    return brought | fields


def parse_layout(text: str, base: dict[str, object] | None = None) -> Layout:
    """A Layout from the short notation; fields that `text` does not state come from `base`.

    Raises TrimaranError naming the word that is not understood, or the field that is out of range.
    """
    if not text.strip():
        raise TrimaranError("layout is empty: write for example dp2,tp2,pp2,mbs1")
    fields = {**(base or {}), **stated_fields(text)}
    try:
        return Layout.model_validate(fields)
    except ValidationError as error:
        raise TrimaranError(f"layout {quoted(text)}: {first_error(error)}") from None
