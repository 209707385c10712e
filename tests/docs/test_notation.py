"""Every word that a layout may be written with stands in the table of words, so that a winner can be read."""

import re
from pathlib import Path

from trimaran.layout.choices import CHOICES
from trimaran.layout.layout import Layout

PLANNING = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()


def stems(notation: str) -> set[str]:
    """What words of a layout begin with, before a number or a hyphen: `dp` of dp64, `recompute` of recompute-full."""
    return {re.split(r"[-\d]", word)[0] for word in notation.split(",")}


def test_the_table_of_words_has_each_word_of_a_layout() -> None:
    table = PLANNING[PLANNING.index("| word |") : PLANNING.index("A search names only")]
    known = {stem for notation in re.findall(r"`([^`]+)`", table) for stem in stems(notation)}
    usual = {choice.name: getattr(Layout(), choice.name) for choice in CHOICES}
    written = {
        choice.word.writes(usual | {choice.name: value})
        for choice in CHOICES
        for value in choice.words or ((1, 2) if choice.default == () else 2,)
    }
    assert {"ps", "fsdp", "recompute-selective", "compress-int8", "on1-2", "split1-2"} <= written
    assert {word for word in written if word and not stems(word) <= known} == set()
