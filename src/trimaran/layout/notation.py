"""The short notation of layouts, `dp8,tp4,pp12,mbs2,zero1,recompute-full,bf16`, read; Layout.label writes it."""

from __future__ import annotations

import re

from pydantic import ValidationError

from trimaran.layout.layout import SCHEDULES, Layout
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.nouns.precision import PRECISIONS

_NUMBERED = re.compile(r"(dp|tp|pp|vpp|mbs|zero)=?(\d+)")
_LATER = {"cp": "context parallelism", "ep": "expert parallelism", "hsdp": "hybrid sharding", "fp8": "fp8"}
_LATER |= {"offload": "offload to the host"}
_RECOMPUTE = re.compile(r"recompute[-=](none|selective|full)(\d*)")


def _parse_word(word: str) -> dict[str, object] | None:
    """Fields that one word of the notation states, or None where it is not understood."""
    if match := _NUMBERED.fullmatch(word):
        return {"zero_stage" if match[1] == "zero" else match[1]: int(match[2])}
    if match := _RECOMPUTE.fullmatch(word):
        return {"recompute": match[1], "recompute_every": int(match[2] or 1)}
    if word in PRECISIONS:
        return {"precision": word}
    if word in SCHEDULES:
        return {"schedule": word}
    if match := re.fullmatch(r"split(\d+(?:x\d{1,6})?(?:-\d+(?:x\d{1,6})?)*)", word):
        runs = (run.partition("x") for run in match[1].split("-"))
        return {"stage_split": tuple(int(layers) for layers, _, n in runs for _ in range(int(n or 1)))}
    if word.startswith("place-"):
        return {"placement": tuple(word.split("-")[1:])}
    flags: dict[str, dict[str, object]] = {
        "ps": {"dp_kind": "parameter_server"},
        "fsdp": {"dp_kind": "fully_sharded", "zero_stage": 3},
        "sp": {"sequence_parallel": True},
    }
    return flags.get(word)


def stated_fields(text: str) -> dict[str, object]:
    """The fields that a layout in short notation states, `dp8,tp4,pp12,mbs2,zero1,recompute-full,bf16`.

    Raises TrimaranError naming the word that is not understood or states a field again.
    """
    fields: dict[str, object] = {}
    for word in filter(None, re.split(r"[,\s]+", text.strip().lower())):
        later = _LATER.get(word) or _LATER.get(word.rstrip("0123456789="))
        if later:
            raise TrimaranError(f"layout: {word!r} asks for {later}, which Trimaran does not do yet: leave it out")
        stated = _parse_word(word)
        if stated is None:
            raise TrimaranError(
                f"layout: {word!r} is not understood; write for example dp8,tp4,pp12,mbs2,zero1,recompute-full,bf16"
            )
        for name in stated.keys() & fields.keys():
            # `fsdp` says ZeRO 3, and so may the user
            if name != "zero_stage" or stated[name] != fields[name]:
                raise TrimaranError(f"layout {text!r}: {word!r} states {name} a second time: leave one of them out")
        fields.update(stated)
    return fields


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
        raise TrimaranError(f"layout {text!r}: {first_error(error)}") from None
