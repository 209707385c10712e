"""Recompute: the words for what the backward computes again: nothing, all, the stack's selection, or named modules."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Annotated

from pydantic import AfterValidator

from trimaran.nouns.noun import Noun

# The modules that Megatron-Core's --recompute-modules can name (megatron/core/transformer/transformer_config.py,
# recompute_modules), in the order in which they are written here. trimaran.operators.modules says what they cover.
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
WHOLE = ("none", "selective", "full")
# Every word in the order of the indexes in a grid of layouts: the plain ones, then every set of modules.
RECOMPUTES: tuple[str, ...] = (
    *WHOLE, *("+".join(chosen) for count in range(1, len(MODULES) + 1) for chosen in combinations(MODULES, count)),
)  # fmt: skip
# Names that published tables shorten.
_SHORT = {
    "norm": "layernorm", "act": "moe_act", "shared_expert": "shared_experts", "attn": "core_attn",
    "mla_up": "mla_up_proj",
}  # fmt: skip
_EVERY = re.compile(r"every-([1-9]\d{0,4})")


class RecomputeModule(Noun):
    """A part of a layer that some software can be told to make again, and the operators that it covers."""

    name: str
    operators: tuple[str, ...]


def recompute_word(text: str) -> str:
    """The word as it is kept, modules in their order and once each; raises ValueError for what is none."""
    if text in WHOLE:
        return text
    named = set(text.split("+"))
    if not named <= set(MODULES):
        raise ValueError(f"expected {', '.join(WHOLE)}, or modules joined by +: {', '.join(MODULES)}")
    return "+".join(module for module in MODULES if module in named)


def modules_of(word: str) -> tuple[str, ...]:
    """The modules that a word names; none of the plain words does."""
    return () if word in WHOLE else tuple(word.split("+"))


def recompute_cell(text: str) -> str:
    """A cell of the column `recompute`: a word, `every-2` for every second layer, or unknown; else ValueError.

    Modules may stand behind `selective:`, apart by commas or spaces, and be named shortly: `norm, act`.
    """
    text = text.lower().strip()
    named = re.split(r"[\s,+]+", text.removeprefix("selective:").strip())
    if set(named) - set(WHOLE) and set(named) <= {*MODULES, *_SHORT}:
        text = "+".join(_SHORT.get(name, name) for name in named)
    if text == "unknown" or _EVERY.fullmatch(text):
        return text
    try:
        return recompute_word(text)
    except ValueError as error:
        raise ValueError(f"recompute is {text!r}, {error}; or every-2 for every second layer, or unknown") from None


def stated_by(cell: str) -> tuple[str, int]:
    """The word of a cell, and of which layers: 1 of all, 2 of every second. Unknown counts as none."""
    if match := _EVERY.fullmatch(cell):
        return "full", int(match[1])
    return ("none" if cell == "unknown" else cell), 1


Recompute = Annotated[str, AfterValidator(recompute_word)]
