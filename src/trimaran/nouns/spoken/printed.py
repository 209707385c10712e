"""Printed: what the cells of others' tables print: dashes, separators of thousands, units, and the field's words.

All of it says one thing alone, whoever reads it. What may mean two things, as `8k` tokens or a vocabulary of 50k, is
read by nobody here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# A cell that says that there is nothing to say.
_NOTHING = frozenset({"", "-", "--", "---", "\N{EN DASH}", "\N{EM DASH}", "n/a", "na"})
# The same under a number, and under words none of which is `none`: Python and YAML print it so.
_NONE = frozenset({"none", "null"})
_NUMBER = re.compile(r"([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)\s*([A-Za-z][A-Za-z/.]*)?")

# How many of a unit make the column's own. Documents that print "GB" may mean GiB: it is taken as they print it.
PER_GIB: Mapping[str, float] = {
    "TiB": 1 / 1024, "TB": 1 / 1024, "GiB": 1.0, "GB": 1.0, "MiB": 1024.0, "MB": 1024.0, "KiB": 2.0**20,
}  # fmt: skip
PER_SECOND: Mapping[str, float] = {
    "ms": 1000.0, **dict.fromkeys(("s", "sec", "secs", "seconds"), 1.0), **dict.fromkeys(("min", "minutes"), 1 / 60),
    **dict.fromkeys(("h", "hours"), 1 / 3600),
}  # fmt: skip
_PER_UNIT: Mapping[str, Mapping[str, float]] = {
    "GiB": PER_GIB,
    "s": PER_SECOND,
    "ms": {"ms": 1.0, "s": 1 / 1000, "us": 1000.0},
    "gigabit/s": {"Gbps": 1.0, "Gb/s": 1.0, "Gbit/s": 1.0, "Mbps": 1000.0},
    "tokens": {"tokens": 1.0},
    "sequences": {"sequences": 1.0, "samples": 1.0, "seqs": 1.0},
    "devices": dict.fromkeys(("devices", "GPUs", "GPU", "gpus", "ranks"), 1.0),
    "nodes": dict.fromkeys(("nodes", "node"), 1.0),
    "TFLOP/s": dict.fromkeys(("TFLOP/s", "TFLOPs", "TFLOPS", "TFlops", "TFLOPs/s"), 1.0),
    "tokens/s": dict.fromkeys(("tokens/s", "tok/s", "tokens/sec", "tps"), 1.0),
}

# What the choices of a column are called elsewhere, in letters and digits alone.
_WORDS: Mapping[str, Mapping[str, str]] = {
    "precision": {
        **dict.fromkeys(("float32", "single", "fullprecision"), "fp32"),
        **dict.fromkeys(("float16", "half", "fp16mixed", "mixedfp16", "ampfp16", "fp16mixedprecision"), "fp16"),
        "fp16fp32": "fp16",
        **dict.fromkeys(("bfloat16", "bf16mixed", "mixedbf16", "ampbf16", "bf16mixedprecision"), "bf16"),
        # E4M3 forward and E5M2 backward, or E4M3 alone, in one scale a tensor or as the stack has it
        **dict.fromkeys(
            ("float8", "fp8hybrid", "fp8e4m3", "fp8delayed", "fp8tensorwise", "float8tensorwise", "ampfp8", "fp8mixed",
             "mixedfp8", "fp8blockwise", "fp8blockwisee4m3"),
            "fp8",
        ),
        "float8rowwise": "fp8_rowwise",
    },
    "optimizer": dict.fromkeys(("adamw", "fusedadam", "fusedadamw", "adamfused", "adamwfused", "cpuadam"), "adam"),
    "dp_kind": {
        **dict.fromkeys(("ddp", "zero"), "all_reduce"),
        **dict.fromkeys(("fsdp", "fsdp1", "fsdp2", "fullshard"), "fully_sharded"),
        "ps": "parameter_server",
    },
    # PipeDream-Flush and DAPPLE are 1F1B (arXiv 2104.04473, section 2.2), all forwards before all backwards is GPipe
    "schedule": {
        **dict.fromkeys(("interleaved1f1b", "1f1binterleaved"), "interleaved"),
        **dict.fromkeys(("pipedreamflush", "dapple", "1f1bnoninterleaved", "noninterleaved1f1b"), "1f1b"),
        **dict.fromkeys(("afab", "allforwardallbackward"), "gpipe"),
        "zbh1": "zero_bubble",
        "zbvzerobubble": "zbv",
    },
    "recompute": {
        **dict.fromkeys(("yes", "true", "on"), "full"),
        **dict.fromkeys(("no", "false", "off"), "none"),
        "selectiveop": "selective",
        "every2": "every-2",
    },
    "dispatcher": {"a2a": "alltoall"},
    "status": {
        **dict.fromkeys(("success", "succeeded", "done", "completed"), "ok"),
        **dict.fromkeys(("outofmemory", "cudaoom", "cudaoutofmemory"), "oom"),
        **dict.fromkeys(("failed", "failure", "error"), "fail"),
        "notrun": "not_run",
    },
}  # fmt: skip
_STAGE = re.compile(r"(?:zero|stage|z|zero\W?stage)[\s_-]?([0-3])", re.IGNORECASE)


def says_nothing(text: str, none_is_a_word: bool) -> bool:
    """Whether a cell is one that its author left open."""
    lower = text.strip().lower()
    return lower in _NOTHING or (lower in _NONE and not none_is_a_word)


def letters_of(text: str) -> str:
    """A text's letters and digits, in lower case: however its words are set apart."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def word_elsewhere(column: str, text: str) -> str | None:
    """The column's own word for what a cell calls otherwise, or None where nothing else is known by it."""
    words = _WORDS.get(column)
    return words.get(letters_of(text)) if words else None


def number_printed(column: str, unit: str, text: str) -> float | None:
    """The number of a cell in its column's unit: of `12,345`, `1.2 s` or `ZeRO-1`; None where it has none."""
    if column == "zero_stage" and (stage := _STAGE.fullmatch(text)):
        return float(stage[1])
    if not (found := _NUMBER.fullmatch(text)):
        return None
    per_unit = _PER_UNIT.get(unit, {}).get(found[2]) if found[2] else 1.0
    return None if per_unit is None else float(found[1].replace(",", "")) / per_unit


def ended_as(text: str) -> str | None:
    """How a run ended, where a measured figure's cell says so: OOM, Fail, Fail(OOM), hang, x, xxxx."""
    lower = text.lower()
    if "oom" in lower or "out of memory" in lower:
        return "oom"
    if "hang" in lower:
        return "hang"
    if lower.startswith("fail") or set(lower) == {"x"}:
        return "fail"
    return None
