"""The stages of a pipeline in torchtitan's settings: by its own rule where that makes them, else module by module."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from trimaran.layout.layout import Layout
from trimaran.nouns.stack import Schedule

SCHEDULES: Mapping[Schedule, str] = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
# Chunks a rank where nothing says how many (distributed/pipeline_parallel.py of 0.2.2, line 113; of 0.3.0, line 267).
USUAL_CHUNKS: Mapping[Schedule, int] = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zbv": 2, "dualpipev": 2}
LESS = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")


def titan_split(layers: int, stages: int, first_less: int, last_less: int) -> tuple[int, ...]:
    """Layers of each stage where embedding and head stand for so many layers, the first stages taking the rest.

    distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part of 0.2.2, lines 237 to 330. () where torchtitan
    refuses, and where a stage would be left without a layer.
    """
    share, extra = divmod(layers + first_less + last_less, stages)
    split = [share + (stage < extra) for stage in range(stages)]
    split[0] -= first_less
    split[-1] -= last_less
    return tuple(split) if min(split) > 0 and max(first_less, last_less) <= share else ()


def stage_settings(layout: Layout, split: tuple[int, ...], head: str) -> dict[str, Any]:
    """The settings of a pipeline, none where there is none; `head` is torchtitan's name of the output matrix."""
    if layout.pp == 1:
        return {}
    settings: dict[str, Any] = {
        "pipeline_parallel_schedule": SCHEDULES[layout.schedule],
        "pipeline_parallel_microbatch_size": layout.mbs,
    }
    for less in (0, 1):
        weight = sum(split) + 2 * less
        chunk = -(-weight // len(split))
        stated = layout.vpp != USUAL_CHUNKS[layout.schedule]
        counts_out = layout.vpp > 1 and -(-weight // chunk) == len(split)
        if titan_split(sum(split), len(split), less, less) == split and (counts_out or not stated):
            settings |= dict.fromkeys(LESS, less)
            return settings | ({"pipeline_parallel_layers_per_stage": chunk} if stated else {})
    return settings | {"module_fqns_per_model_part": _modules(split, head)}


def _modules(split: tuple[int, ...], head: str) -> list[list[str]]:
    ends = list(accumulate(split))
    stages = [[f"layers.{layer}" for layer in range(end - own, end)] for own, end in zip(split, ends, strict=True)]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", head]
    return stages
