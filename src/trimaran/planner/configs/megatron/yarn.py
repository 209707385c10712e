"""YaRN's numbers in Megatron-LM's arguments, and in the fields that recipes of Megatron-Bridge state besides."""

from __future__ import annotations

from trimaran.nouns.attention import magnitude
from trimaran.planner.configs.flags import Flags
from trimaran.planner.configs.stated import Stated
from trimaran.planner.export.megatron_yarn import (
    APART,
    FACTOR,
    FIELDS,
    MSCALE,
    MSCALE_ALL_DIM,
    UNTRUNCATED,
    USUAL,
    USUAL_MSCALE,
    YARN,
)

_OPTIONS = {field: option for option, field in APART.items()}


def yarn(flags: Flags, stated: Stated, *, latent: bool) -> None:
    """How yarn stretches the angles of latent or other attention; without its factor its numbers are not known.

    Of latent attention alone --mscale-all-dim multiplies the scores besides (multi_latent_attention.py, line 177).
    """
    model, factor = stated.model, flags.number(FACTOR)
    model["rotary_stretch"] = YARN
    options = {field: f"--{name.replace('_', '-')}" for field, name in FIELDS.items()} if latent else _OPTIONS
    numbers: dict[str, object] = dict(USUAL)
    for field, option in options.items():
        if (value := flags.number(option)) is not None:
            numbers[field] = value
    mscale, all_dim = flags.number(MSCALE), flags.number(MSCALE_ALL_DIM) or 0.0
    if flags.has(UNTRUNCATED) and not latent:
        numbers["truncate"] = False
    if factor is None:
        stated.notes.append(
            f"{FACTOR} is not stated, so yarn's numbers are not known: Megatron-LM takes 1, and Megatron-Bridge 40"
        )
        return
    grown = magnitude(factor, USUAL_MSCALE if mscale is None else mscale)
    model["rotary_yarn"] = {
        "factor": factor,
        **numbers,
        "attention_factor": grown / magnitude(factor, all_dim),
        "mscale_all_dim": all_dim if latent else 0.0,
    }
