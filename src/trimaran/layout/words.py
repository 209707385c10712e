"""Words: how each choice of a layout is written in and read from the short notation, one word of it at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from trimaran.layout.axes import full_placement, stated_placement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.recompute import MODULES, WHOLE, recompute_word
from trimaran.nouns.text import QUOTED, shortened

Fields = Mapping[str, Any]
# Longer runs of equal shares are written `6x10` in the short notation.
_LONG_RUN = 4
# No model has more layers, and a stage has one at least; nor has a cluster room for more replicas.
MOST_PLACES = 100_000
MOST_DEVICES = 1_000_000
_MOST_DIGITS = 18


@dataclass(frozen=True)
class Word:
    """How one choice is written: `writes` gives its word of a layout's fields, empty where it goes without saying.

    `pattern` matches a whole word that states the choice, and `reads` gives the fields that the match states.
    """

    pattern: str
    reads: Callable[[re.Match[str]], dict[str, Any]]
    writes: Callable[[Fields], str]


def _number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise TrimaranError(f"layout: {shortened(digits, QUOTED)} is beyond any number of a layout: correct it")
    return int(digits)


def numbered(name: str, word: str, usual: int | None = 1) -> Word:
    """A number behind its word, `dp8`; left out where it is `usual`."""
    return Word(
        rf"{word}=?(\d+)",
        lambda match: {name: _number(match[1])},
        lambda fields: "" if fields[name] == usual else f"{word}{fields[name]}",
    )


def spelled(name: str, words: tuple[str, ...], usual: Callable[[Fields], str]) -> Word:
    """The choice's own word, `bf16`; left out where it is the usual one beside the other fields."""
    return Word(
        "|".join(words),
        lambda match: {name: match[0]},
        lambda fields: "" if fields[name] == usual(fields) else fields[name],
    )


def prefixed(name: str, prefix: str, words: tuple[str, ...], usual: str) -> Word:
    """The choice's own word behind a prefix, `cp-ulysses`; left out where it is the usual one."""
    return Word(
        rf"{prefix}[-=]({'|'.join(words)})",
        lambda match: {name: match[1]},
        lambda fields: "" if fields[name] == usual else f"{prefix}-{fields[name]}",
    )


def flagged(name: str, meanings: Mapping[str, Mapping[str, Any]]) -> Word:
    """Short words that stand for a value each, and may state other fields with it; other values go without saying."""
    short = {stated[name]: word for word, stated in meanings.items()}
    return Word(
        "|".join(meanings),
        lambda match: dict(meanings[match[0]]),
        lambda fields: short.get(fields[name], ""),
    )


def recomputing() -> Word:
    """What is recomputed, and of which layers: `recompute-core_attn+mlp`, `recompute-full2` for every second layer."""
    module = f"(?:{'|'.join(MODULES)})"

    def writes(fields: Fields) -> str:
        every = fields["recompute_every"] if fields["recompute_every"] > 1 else ""
        return f"recompute-{fields['recompute']}{every}" if every or fields["recompute"] != "none" else ""

    return Word(
        rf"recompute[-=]({'|'.join(WHOLE)}|{module}(?:\+{module})*)(\d*)",
        lambda match: {"recompute": recompute_word(match[1]), "recompute_every": _number(match[2] or "1")},
        writes,
    )


def beside(other: str) -> Word:
    """A choice that the word of `other` states."""
    return Word(r"(?!)", lambda match: {}, lambda fields: "")


def shared_out(name: str, word: str, places: str) -> Word:
    """How much each of many `places` has, in runs: `split5-6x10-5`, where `6x10` stands for ten stages of 6 layers."""
    run = r"\d+(?:x\d{1,6})?"

    def reads(match: re.Match[str]) -> dict[str, Any]:
        runs = [(_number(share), _number(n or "1")) for share, _, n in (r.partition("x") for r in match[1].split("-"))]
        if (stated := sum(n for _, n in runs)) > MOST_PLACES:
            raise TrimaranError(f"layout: its {word} has {stated} {places}, and at most {MOST_PLACES} are stated")
        return {name: tuple(share for share, n in runs for _ in range(n))}

    def writes(fields: Fields) -> str:
        lengths = [(share, len(list(same))) for share, same in groupby(fields[name])]
        shares = [[f"{share}x{n}"] if n > _LONG_RUN else [str(share)] * n for share, n in lengths]
        return word + "-".join(share for run in shares for share in run) if shares else ""

    return Word(rf"{word}({run}(?:-{run})*)", reads, writes)


def listed_in_runs(name: str, word: str) -> Word:
    """Numbers behind the word, those that follow each other as a run: `on0-3.8.6`; left out where there are none."""
    run = r"\d+(?:-\d+)?"

    def reads(match: re.Match[str]) -> dict[str, Any]:
        numbers: list[int] = []
        for first, _, last in (part.partition("-") for part in match[1].split(".")):
            least, most = _number(first), _number(last or first)
            if most < least or len(numbers) + most - least >= MOST_DEVICES:
                raise TrimaranError(
                    f"layout: {word} {first}-{last} is no run of at most {MOST_DEVICES} devices: write the lesser first"
                )
            numbers += range(least, most + 1)
        return {name: tuple(numbers)}

    def writes(fields: Fields) -> str:
        # numbers of a run are all as far from their places
        runs = [[n for _, n in same] for _, same in groupby(enumerate(fields[name]), lambda pair: pair[1] - pair[0])]
        return ".".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)

    return Word(rf"{word}({run}(?:\.{run})*)", reads, lambda fields: f"{word}{writes(fields)}" if fields[name] else "")


def ordered(name: str, usual: tuple[str, ...]) -> Word:
    """Axes from the innermost outwards: `place-tp-pp-dp`."""
    return Word(
        r"place-(.*)",
        lambda match: {name: full_placement(tuple(match[1].split("-")))},
        lambda fields: "" if fields[name] == usual else "place-" + "-".join(stated_placement(fields[name])),
    )
