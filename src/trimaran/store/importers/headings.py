"""Headings of the field's tables, and the column that each stands for."""

from __future__ import annotations

from trimaran.nouns.columns import COLUMNS

# Pseudo-columns: a Size picks cells of a profile, a network setting fills two columns.
SIZE, NETWORK = "size", "network"

_HEADINGS = {
    "nodes": ("nodes", "nnodes", "n nodes", "number of nodes", "num nodes"),
    "devices": ("gpus", "devices", "ranks", "world size", "number of gpus", "num gpus", "ngpus", "accelerators"),
    "devices_per_node": ("gpus per node", "gpus/node", "devices per node"),
    "layers": ("layers", "nlayers", "num layers", "number of layers"),
    "hidden": ("hidden", "nhidden", "hidden size", "hidden dim", "hidden dimension", "d model"),
    "ffn_hidden": ("ffn", "ffn size", "ffn hidden size", "intermediate size"),
    "heads": ("heads", "nheads", "num attention heads", "attention heads", "number of attention heads", "num heads"),
    "kv_heads": ("kv heads", "key value heads", "num kv heads", "query groups", "num query groups"),
    "seq_len": ("seq", "seq len", "sequence length", "seq length", "seqlen", "context length"),
    "vocab": ("vocab", "vocab size", "vocabulary", "vocabulary size"),
    "dp": ("dp", "dp size", "data parallel size", "data parallelism", "data parallel"),
    "tp": ("tp", "mp", "tp size", "tensor parallel size", "tensor mp size", "tensor parallelism", "tensor parallel"),
    "pp": ("pp", "pp size", "pipeline parallel size", "pipeline mp size", "pipeline parallelism", "pipeline parallel"),
    "cp": ("cp", "cp size", "context parallel size", "context parallelism", "context parallel"),
    "ep": ("ep", "ep size", "expert parallel size", "expert parallelism", "expert parallel"),
    "etp": ("etp", "expert tensor parallel size"),
    "vpp": ("vpp", "vp", "virtual stages", "virtual pipeline size"),
    "mbs": ("mbs", "micro batch size", "micro batch", "microbatch", "microbatch size"),
    "gbs": ("gbs", "bs", "global batch size", "global batch"),
    "zero_stage": ("zs", "zero", "zero stage"),
    "recompute": ("ac", "recompute", "recomputation", "activation checkpointing", "activation recomputation"),
    "precision": ("precision", "dtype", "data type"),
    "schedule": ("schedule", "pipeline schedule"),
    "variant": ("variant", "environment"),
    "mem_gib": ("mem", "memory", "peak mem", "peak memory", "memory per gpu", "memory/gpu", "mem/gpu", "max memory"),
    "sec_per_it": (
        "sec/it", "s/it", "execution time", "iteration time", "step time", "time per iteration", "time per step",
        "time/iteration", "time/step", "seconds per iteration", "sec/iteration", "s/iteration", "sec/step", "s/step",
    ),
    "tflops": (
        "tflops", "tflop/s", "tflops/gpu", "tflop/s/gpu", "tflops per gpu", "tflop/s per gpu",
        "achieved teraflop/s per gpu",
    ),
    "tokens_per_s_per_gpu": ("tokens/s/gpu", "tokens/sec/gpu", "tokens per second per gpu", "tgs"),
    "status": ("status",),
    "notes": ("notes", "note"),
    SIZE: ("size", "model size"),
    NETWORK: ("network setting", "network"),
}  # fmt: skip
_BY_HEADING = {heading: name for name, headings in _HEADINGS.items() for heading in headings}
_COLUMN_NAMES = frozenset(column.name for column in COLUMNS)

# Words that tables print for a column's own choices.
WORDS = {"recompute": {"yes": "full", "no": "none"}}


def column_of(heading: str) -> str | None:
    """The column behind a printed heading, a column's own name included; None where it is not known."""
    bare = _without_unit(heading)[0]
    plain = " ".join(bare.lower().replace("-", " ").replace("_", " ").removeprefix("#").split())
    return bare if bare in _COLUMN_NAMES else _BY_HEADING.get(plain)


def unit_of(heading: str) -> str:
    """The unit in brackets behind a heading, as in `Mem (MiB)`; empty where there is none."""
    return _without_unit(heading)[1]


def _without_unit(heading: str) -> tuple[str, str]:
    bare, opened, behind = heading.strip().replace("[", "(").replace("]", ")").partition("(")
    unit = behind.removesuffix(")").strip()
    return (bare.strip(), unit) if opened and bare.strip() else (heading.strip(), "")
