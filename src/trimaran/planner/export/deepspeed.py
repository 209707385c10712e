"""A DeepSpeed configuration (https://www.deepspeed.ai/docs/config-json/, deepspeed/runtime/config.py of 0.19.8)."""

from __future__ import annotations

import json
from typing import Any

from trimaran.layout.axes import USUAL_PLACEMENT
from trimaran.layout.layout import Layout
from trimaran.nouns.stack import DataParallelKind, Offload
from trimaran.nouns.workload import Workload
from trimaran.planner.export.asked import Asked
from trimaran.planner.export.refuse import refuse_first

VERSIONS = ("0.19", "0.18")
# What it has: whatever else a layout chooses is refused.
_KINDS: tuple[DataParallelKind, ...] = ("all_reduce", "fully_sharded")
_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "weights")


def deepspeed(asked: Asked) -> str:
    """The JSON file for a data-parallel run; TP and PP are Megatron-DeepSpeed's to state."""
    layout, workload, stack, version = asked.layout, asked.workload, asked.stack, asked.version
    refuse_first(
        "DeepSpeed",
        layout,
        (
            (layout.cp > 1 and layout.cp_kind != "ulysses", f"CP by {layout.cp_kind}"),
            (
                layout.size("replicate") > 1 and layout.zero_stage in (1, 2),
                f"shard {layout.shard} in ZeRO stage {layout.zero_stage}",
            ),
            # deepspeed/runtime/config.py of 0.19.8, line 121: MiCS has been removed
            (
                layout.size("replicate") > 1 and layout.zero_stage == 3 and version == "0.19",
                f"shard {layout.shard} (0.18 has MiCS: --for-version 0.18)",
            ),
            (workload.model.experts > 0, "experts, which are laid out where the model is made"),
            (workload.ramp_up is not None, "a batch ramp-up"),
            (layout.offload not in _OFFLOADS, f"offload {layout.offload} in its configuration file"),
            (layout.placement != USUAL_PLACEMENT, f"placement {'-'.join(layout.placement)}"),
            (layout.tp > 1, f"TP {layout.tp} in its configuration file (export to megatron-deepspeed)"),
            (layout.pp > 1, f"PP {layout.pp} in its configuration file (export to megatron-deepspeed)"),
            (
                layout.recompute != "none",
                f"{layout.recompute} recompute in its configuration file (the model switches it on)",
            ),
        ),
    )
    config = deepspeed_config(layout, workload)
    zero = config["zero_optimization"]
    if layout.zero_stage:
        # What the planner counted; left out, 0.19 overlaps under stage 3 alone (deepspeed/runtime/zero/config.py).
        zero["overlap_comm"] = stack.overlap_dp > 0 and layout.zero_stage in stack.overlapped_zero_stages
    if layout.zero_stage and stack.bucket_elements:
        zero["reduce_bucket_size"] = stack.bucket_elements
    if layout.zero_stage == 3 and layout.size("replicate") > 1:
        zero["mics_shard_size"] = layout.size("shard")
    if layout.offload in ("optimizer", "weights"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if layout.offload == "weights":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if layout.cp > 1:
        config["sequence_parallel_size"] = layout.cp
    return json.dumps(config, indent=2)


def deepspeed_config(layout: Layout, workload: Workload) -> dict[str, Any]:
    """What the file holds: batch sizes, ZeRO stage, precision. Raises TrimaranError for what it has no word for."""
    refuse_first("DeepSpeed", layout, ((layout.dp_kind not in _KINDS, f"data-parallel kind {layout.dp_kind}"),))
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
    if layout.zero_stage and workload.optimizer != "adam":
        # deepspeed/runtime/engine.py of 0.19.8, _do_optimizer_sanity_check, asks for it of what is none of Adam's kin
        config["zero_allow_untested_optimizer"] = True
    return config
