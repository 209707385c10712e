"""The shape of torchtitan's model as its log states it: arguments as Python prints them, or a configuration as JSON.

The JSON is first of the same arguments (torchtitan 0.2.2, torchtitan/train.py, line 144), then of a tree with one
layer, then of one with all layers (pytorch/torchtitan, torchtitan/models/llama3/__init__.py; make_ffn_config and
make_gqa_config of torchtitan/models/common/config_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimaran.nouns.columns import Cell
from trimaran.store.importers.json_text import json_object, number_in
from trimaran.store.importers.logs.steps import mixture

_ARGUMENTS = re.compile(r"\b\w{0,40}ModelArgs\((.{1,8000})")
_SIZE = re.compile(
    r"\b(dim|n_layers|n_heads|n_kv_heads|vocab_size|multiple_of|ffn_dim_multiplier|head_dim|hidden_dim)="
    r"(\d{1,9}(?:\.\d{1,9})?)"
)
_EXPERTS = re.compile(r"\b(num_experts|n_experts|n_routed_experts)=(\d{1,6})\b")
# Qwen3's arguments have those of experts in a dense model too (torchtitan 0.2.2, models/qwen3/model/args.py, line 47).
_NO_EXPERTS = "moe_enabled=False"
# `Building llama3 8B with TransformerModelArgs(...`, and `with {` since its arguments are JSON; in 0.2.2 `8Bwith {`
_BUILDING = re.compile(r"\bBuilding (?!device mesh |\d-D device )\S{1,60} \S{1,60}? ?with ")
# What torchrun's tee puts before every line of a rank.
_RANK = re.compile(r"\[\w{1,20}\d{1,7}\]:")
_COLUMNS = {
    "dim": "hidden", "n_layers": "layers", "n_heads": "heads", "n_kv_heads": "kv_heads", "vocab_size": "vocab",
    "hidden_dim": "ffn_hidden",
}  # fmt: skip
_OTHERS = ("multiple_of", "ffn_dim_multiplier", "head_dim")


def is_built(line: str) -> bool:
    """Whether a line says that a model is built, and of what."""
    return "Building " in line and _BUILDING.search(line) is not None


def model_of(lines: Sequence[str], at: int) -> tuple[dict[str, Cell], str] | None:
    """The cells of the model that the line `at`, or the JSON below it, states, and why it is a mixture, if it is one.

    None where they state no model.
    """
    line = lines[at]
    if stated := _ARGUMENTS.search(line):
        sizes = {name: float(value) for name, value in _SIZE.findall(stated[1])}
        experts = None if _NO_EXPERTS in stated[1] else _EXPERTS.search(stated[1])
        return _cells(sizes), mixture(experts[1], experts[2]) if experts and int(experts[2]) > 1 else ""
    if not (is_built(line) and line.rstrip().endswith("with {")):
        return None
    config = json_object("\n".join(["{", *_below(lines, at)]))
    return (_cells(_sizes_in(config)), _experts_in(config)) if config else None


def _below(lines: Sequence[str], at: int) -> Iterator[str]:
    """The lines of the same rank behind `at`, without its prefix, up to a brace at a line's front."""
    prefix = rank[0] if (rank := _RANK.match(lines[at])) else ""
    for number in range(at + 1, len(lines)):
        line = lines[number]
        if "Building " in line:
            return  # of another rank, or another start
        if line.startswith(prefix):
            line = line[len(prefix) :].rstrip()
            yield line
            if line == "}":
                return


def _cells(sizes: Mapping[str, float]) -> dict[str, Cell]:
    """Sizes by torchtitan's names as columns; those that are None are left to others.

    The MLP's width follows from `dim`, where it is not stated, as torchtitan builds it: two thirds of 4 dim, times the
    multiplier, rounded up (torchtitan/models/llama3/model/model.py, FeedForward.__init__).
    """
    cells: dict[str, Cell] = {column: int(sizes[name]) for name, column in _COLUMNS.items() if name in sizes}
    if "dim" in sizes and sizes.get("multiple_of"):
        width = int(int(2 * 4 * sizes["dim"] / 3) * sizes.get("ffn_dim_multiplier", 1.0))
        step = int(sizes["multiple_of"])
        cells.setdefault("ffn_hidden", -(-width // step) * step)
    if "hidden" in cells:
        cells["mlp"] = "swiglu"
    if "heads" in cells:
        cells.setdefault("kv_heads", cells["heads"])
    if sizes.get("head_dim", 0.0) * sizes.get("n_heads", 0.0) not in (0.0, sizes.get("dim")):
        cells["head_dim"] = int(sizes["head_dim"])
    return cells


def _sizes_in(config: Mapping[str, Any]) -> dict[str, float]:
    """Sizes at the top of a configuration, or in its layer; where there is one of each layer, in the first."""
    layers = config.get("layers")
    layer = layers[0] if isinstance(layers, list) and layers else config.get("layer")
    attention, mlp = (_within(layer, name) for name in ("attention", "feed_forward"))
    stated = {
        **{name: number_in(config, name) for name in (*_COLUMNS, *_OTHERS)},
        "n_layers": float(len(layers)) if isinstance(layers, list) else number_in(config, "n_layers"),
    }
    for name in ("n_heads", "n_kv_heads", "head_dim"):
        stated[name] = stated[name] or number_in(attention, name)
    width = number_in(mlp, "hidden_dim") or number_in(_within(mlp, "w1"), "out_features")
    stated["hidden_dim"] = stated["hidden_dim"] or width
    return {name: number for name, number in stated.items() if number}


def _within(config: object, name: str) -> Mapping[str, Any]:
    part = config.get(name) if isinstance(config, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _experts_in(config: Mapping[str, Any]) -> str:
    """Why a configuration is one of a mixture of experts; empty where none of its parts has some."""
    parts: list[object] = [config] if config.get("moe_enabled") is not False else []
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            for name in ("num_experts", "n_experts", "n_routed_experts"):
                if (count := number_in(part, name)) and count > 1:
                    return mixture(name, f"{count:.0f}")
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return ""
