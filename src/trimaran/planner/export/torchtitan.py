"""A torchtitan job configuration (torchtitan/config/job_config.py, 0.2)."""

from __future__ import annotations

from typing import Any

from trimaran.layout.layout import Layout, resolve_split
from trimaran.layout.stages import ends_split
from trimaran.nouns.recompute import modules_of
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.export.refuse import refuse_first

_USUAL_CHUNKS = 2
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}


def torchtitan(layout: Layout, workload: Workload, stack: Stack) -> str:
    """The TOML sections that state a layout; the model's name, flavor and data are the user's to add."""
    import tomli_w

    split = resolve_split(layout, workload, stack)
    refuse_first(
        "torchtitan",
        layout,
        (
            (layout.schedule == "zero_bubble", "the zero-bubble schedule without W-split stages"),
            (layout.zero_stage in (1, 2), f"ZeRO stage {layout.zero_stage}"),
            (layout.dp_kind == "parameter_server", "a parameter server"),
            (layout.tp > 1 and not layout.sequence_parallel, "TP without sequence parallelism"),
            (bool(modules_of(layout.recompute)), f"recompute of {layout.recompute}"),
            (layout.precision in ("fp16", "bf16_pure", "nvfp4"), f"precision {layout.precision}"),
            (layout.placement != ("tp", "dp", "pp"), f"placement {'-'.join(layout.placement)}"),
            (not _splits_so(split, workload.model.layers), "a stage split that torchtitan does not make"),
            (not _counts_out(layout, split), f"VPP {layout.vpp}, whose chunks do not follow from layers a stage"),
            (workload.ramp_up is not None, "a batch ramp-up"),
        ),
    )
    return tomli_w.dumps(_config(layout, workload, stack, split)).rstrip()


def _splits_so(split: tuple[int, ...], layers: int) -> bool:
    """Whether torchtitan splits so: ends that count as a layer each, or equal stages."""
    return split == ends_split(layers, len(split)) or len(set(split)) == 1


def _counts_out(layout: Layout, split: tuple[int, ...]) -> bool:
    """Whether so many layers a stage, rounded up, make as many stages again (distributed/pipeline_parallel.py)."""
    weight = sum(split) + 2 * int(len(set(split)) > 1)
    return layout.vpp <= _USUAL_CHUNKS or -(-weight // -(-weight // len(split))) == len(split)


def _config(layout: Layout, workload: Workload, stack: Stack, split: tuple[int, ...]) -> dict[str, Any]:
    sharded = layout.zero_stage == 3
    per_replica = workload.global_batch // layout.dp
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if sharded else layout.dp,
        "data_parallel_shard_degree": layout.dp if sharded else 1,
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.pp > 1:
        parallelism["pipeline_parallel_schedule"] = _SCHEDULES[layout.schedule]
        parallelism["pipeline_parallel_microbatch_size"] = layout.mbs
        # What embedding and head stand for; without layers a stage torchtitan makes two chunks a rank, or one.
        less = int(len(set(split)) > 1)
        parallelism["pipeline_parallel_first_stage_less_layers"] = less
        parallelism["pipeline_parallel_last_stage_less_layers"] = less
        if layout.vpp > _USUAL_CHUNKS:
            parallelism["pipeline_parallel_layers_per_stage"] = -(-(sum(split) + 2 * less) // len(split))
    recompute: dict[str, Any] = {"mode": layout.recompute}
    if layout.recompute == "selective":
        recompute["selective_ac_option"] = "op"
    elif layout.recompute == "full" and layout.recompute_every > 1:
        recompute = {"mode": "selective", "selective_ac_option": str(layout.recompute_every)}
    return {
        "training": {
            # A pipeline cuts its replica's whole batch into micro-batches; without one the batch accumulates.
            "local_batch_size": per_replica if layout.pp > 1 else layout.mbs,
            "global_batch_size": workload.global_batch,
            "seq_len": workload.seq_len,
            "mixed_precision_param": "float32" if layout.precision == "fp32" else "bfloat16",
        },
        "parallelism": parallelism,
        "activation_checkpoint": recompute,
        **_narrow(layout, stack),
    }


def _narrow(layout: Layout, stack: Stack) -> dict[str, Any]:
    """The converter that makes linear layers compute in fp8 or mxfp8, and what is gathered in it."""
    if layout.precision == "mxfp8":
        return {"model": {"converters": ["quantize.linear.mx"]}}
    if layout.precision != "fp8":
        return {}
    gathers = stack.gathers_casts and layout.zero_stage == 3
    return {
        "model": {"converters": ["quantize.linear.float8"]},
        "quantize": {
            "linear": {
                "float8": {
                    "enable_fsdp_float8_all_gather": gathers,
                    "precompute_float8_dynamic_scale_for_fsdp": gathers,
                    "filter_fqns": ["output"],
                }
            }
        },
    }
