"""A DeepSpeed configuration (https://www.deepspeed.ai/docs/config-json/)."""

from __future__ import annotations

import json
from typing import Any

from trimaran.layout.layout import Layout
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.export.refuse import refuse_first


def deepspeed(layout: Layout, workload: Workload, stack: Stack) -> str:
    """The JSON file for a data-parallel run; TP and PP are Megatron-DeepSpeed's to state."""
    refuse_first(
        "DeepSpeed",
        layout,
        (
            (layout.tp > 1, f"TP {layout.tp} in its configuration file (export to megatron-deepspeed)"),
            (layout.pp > 1, f"PP {layout.pp} in its configuration file (export to megatron-deepspeed)"),
        ),
    )
    return json.dumps(deepspeed_config(layout, workload), indent=2)


def deepspeed_config(layout: Layout, workload: Workload) -> dict[str, Any]:
    """What the file holds: batch sizes, ZeRO stage, precision. Raises TrimaranError for the parameter server."""
    refuse_first("DeepSpeed", layout, ((layout.dp_kind == "parameter_server", "a parameter server"),))
    config: dict[str, Any] = {
        "train_batch_size": workload.global_batch,
        "train_micro_batch_size_per_gpu": layout.mbs,
        "gradient_accumulation_steps": layout.micro_batches(workload.global_batch),
        "zero_optimization": {"stage": layout.zero_stage},
    }
    if layout.precision in ("fp16", "bf16"):
        config[layout.precision] = {"enabled": True}
        if layout.precision == "bf16" and layout.zero_stage == 1:
            config["data_types"] = {"grad_accum_dtype": "fp32"}  # what BF16_Optimizer does, which the stacks state
    elif layout.precision != "fp32":
        refuse_first("DeepSpeed", layout, ((True, f"precision {layout.precision}"),))
    return config
