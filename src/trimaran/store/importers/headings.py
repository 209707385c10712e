"""Headings of the field's tables, and the column that each stands for."""

from __future__ import annotations

from trimaran.nouns.columns import COLUMNS

MEASURED = ("mem_gib", "sec_per_it", "tflops", "tokens_per_s_per_gpu")

# Pseudo-columns: a Size picks cells of a profile, a network setting fills two columns.
SIZE, NETWORK = "size", "network"

_HEADINGS = {
    "nodes": ("nodes", "nnodes", "n nodes"),
    "devices": ("gpus", "devices", "ranks", "world size"),
    "layers": ("layers", "nlayers", "num layers"),
    "hidden": ("hidden", "nhidden", "hidden size"),
    "heads": ("heads", "nheads", "num attention heads"),
    "seq_len": ("seq", "seq len", "sequence length"),
    "dp": ("dp",),
    "tp": ("tp", "mp"),
    "pp": ("pp",),
    "vpp": ("vpp",),
    "mbs": ("mbs", "micro batch size"),
    "gbs": ("gbs", "bs", "global batch size"),
    "zero_stage": ("zs", "zero", "zero stage"),
    "recompute": ("ac", "recompute"),
    "precision": ("precision", "dtype"),
    "schedule": ("schedule",),
    "variant": ("variant", "environment"),
    "mem_gib": ("mem", "memory"),
    "sec_per_it": ("sec/it", "s/it", "execution time"),
    "tflops": ("tflops", "tflop/s"),
    "status": ("status",),
    "notes": ("notes", "note"),
    SIZE: ("size",),
    NETWORK: ("network setting", "network"),
}
_BY_HEADING = {heading: name for name, headings in _HEADINGS.items() for heading in headings}
_COLUMN_NAMES = frozenset(column.name for column in COLUMNS)

# Words that tables print for a column's own choices.
WORDS = {"recompute": {"yes": "full", "no": "none"}}


def column_of(heading: str) -> str | None:
    """The column behind a printed heading, a column's own name included; None where it is not known."""
    bare = _without_unit(heading)[0]
    plain = " ".join(bare.lower().replace("-", " ").replace("_", " ").split())
    return bare if bare in _COLUMN_NAMES else _BY_HEADING.get(plain)


def unit_of(heading: str) -> str:
    """The unit in brackets behind a heading, as in `Mem (MiB)`; empty where there is none."""
    return _without_unit(heading)[1]


def _without_unit(heading: str) -> tuple[str, str]:
    bare, opened, behind = heading.strip().replace("[", "(").replace("]", ")").partition("(")
    unit = behind.removesuffix(")").strip()
    return (bare.strip(), unit) if opened and bare.strip() else (heading.strip(), "")
