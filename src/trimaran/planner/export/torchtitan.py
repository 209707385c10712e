"""A torchtitan configuration: a TOML file for 0.2 (torchtitan/config/job_config.py), a Python module for 0.3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

from trimaran.layout.axes import USUAL_PLACEMENT
from trimaran.layout.layout import Layout, resolve_split
from trimaran.nouns.model import Model
from trimaran.nouns.precision import PRECISIONS, PrecisionName
from trimaran.nouns.recompute import modules_of
from trimaran.nouns.stack import FOLDED, ContextParallelKind, DataParallelKind, ExpertOverlap, Offload, Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.export.asked import Asked
from trimaran.planner.export.refuse import refuse_first
from trimaran.planner.export.torchtitan_experts import expert_settings, untold_experts
from trimaran.planner.export.torchtitan_flavors import flavor_of, without_pipeline
from trimaran.planner.export.torchtitan_registry import registry_module
from trimaran.planner.export.torchtitan_stages import SCHEDULES, stage_settings

VERSIONS = ("0.3", "0.2")
# 0.2's words: its alltoall passes keys and values on around the ranks.
ROTATE_METHODS: Mapping[ContextParallelKind, str] = {"ring": "alltoall", "all_gather": "allgather"}
# What it has: whatever else a layout chooses is refused.
_KINDS: tuple[DataParallelKind, ...] = ("all_reduce", "fully_sharded")
_OFFLOADS: tuple[Offload, ...] = ("none", "weights")
_EXPERT_OVERLAPS: tuple[ExpertOverlap, ...] = ("none", "batch")
_PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "bf16", "bf16_pure", "fp8", "fp8_rowwise", "mxfp8")
# In 0.2.2 a setting of parallelism, in 0.3.0 one of compile; either way of compiled layers alone.
ASYNC_TP = "enable_async_tensor_parallel"


def torchtitan(asked: Asked) -> str:
    """What states a layout, of a model that torchtitan has by name; with 0.2 the data are the user's to add."""
    layout, workload, stack, version = asked.layout, asked.workload, asked.stack, asked.version
    split = resolve_split(layout, workload, stack)
    unsharded = (layout.zero_stage == 0 or layout.dp * layout.cp == 1) and layout.tp * layout.pp > 1
    whole = without_pipeline(workload.model, version)
    refuse_first(
        f"torchtitan {version}",
        layout,
        (
            *untold_experts(layout, workload.model, version),
            (layout.cp > 1 and layout.zero_stage != 3, "whole weights under CP, which it shares out over CP as well"),
            (layout.cp > 1 and layout.cp_kind not in ROTATE_METHODS, f"CP by {layout.cp_kind}"),
            # torchtitan 0.3.0, distributed/context_parallel/api.py, gathers; 0.2.2 has context_parallel_rotate_method
            (layout.cp > 1 and layout.cp_kind == "ring" and version == "0.3", "CP by ring (0.2: --for-version 0.2)"),
            (layout.schedule not in ("none", *SCHEDULES), f"the {layout.schedule} schedule"),
            (layout.pp > 1 and whole != "", f"a pipeline of {whole}"),
            (layout.zero_stage in (1, 2), f"ZeRO stage {layout.zero_stage}"),
            (layout.dp_kind not in _KINDS, f"data-parallel kind {layout.dp_kind}"),
            (layout.tp > 1 and not layout.sequence_parallel and version == "0.2", "TP without sequence parallelism"),
            # torchtitan/models/llama3/infra/parallelize.py, line 151, and distributed/utils.py, line 251, of 0.2.2
            (unsharded and layout.dp > 1 and version == "0.2", "replicas that are not sharded beside TP or PP"),
            (
                unsharded and layout.precision != "fp32" and version == "0.2",
                f"precision {layout.precision} under TP or PP where nothing is sharded",
            ),
            (layout.offload not in _OFFLOADS, f"offload {layout.offload}"),
            (
                layout.ep_overlap not in _EXPERT_OVERLAPS
                or (layout.ep_overlap != "none" and layout.schedule != "dualpipev"),
                f"ep_overlap {layout.ep_overlap} under the {layout.schedule} schedule",
            ),
            (
                layout.ep_overlap != "none" and version == "0.3",
                f"ep_overlap {layout.ep_overlap} (0.2 has: --for-version 0.2)",
            ),
            (
                layout.schedule in FOLDED and PRECISIONS[layout.precision].narrow is not None,
                f"precision {layout.precision}, which is compiled, under the {layout.schedule} schedule",
            ),
            (bool(modules_of(layout.recompute)), f"recompute of {layout.recompute}"),
            (
                layout.recompute == "full" and layout.recompute_every > 1 and version == "0.3",
                f"recomputing one layer in {layout.recompute_every} (0.2 has: --for-version 0.2)",
            ),
            # torchtitan 0.3.0, components/quantization/float8.py: the recipe is rowwise, and FSDP gathers 16 bit
            (
                layout.precision == "fp8" and version == "0.3",
                "precision fp8 with a scale a tensor (0.2 has: --for-version 0.2; 0.3 has fp8_rowwise)",
            ),
            (layout.precision not in _PRECISIONS, f"precision {layout.precision}"),
            (layout.placement != USUAL_PLACEMENT, f"placement {'-'.join(layout.placement)}"),
            (workload.optimizer != "adam", f"optimizer {workload.optimizer}"),
            (workload.ramp_up is not None, "a batch ramp-up"),
            (workload.capacity_factor is not None, "experts that drop tokens"),
        ),
    )
    training, parallelism = _training(layout, workload), _parallelism(layout, workload.model, split, version)
    compiled = _compiled(layout, stack)
    if version == "0.3":
        return registry_module(layout, workload.model, training, parallelism, compiled)
    if compiled.pop(ASYNC_TP, False):
        parallelism[ASYNC_TP] = True
    converters, narrow = _narrow(layout, stack)
    flavor = flavor_of(workload.model, version)
    named = {"name": flavor.name, "flavor": flavor.size} if flavor else {}
    config = {
        **({"model": model} if (model := {**named, **converters}) else {}),
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": _recompute(layout),
        **({"compile": compiled} if compiled else {}),
        **narrow,
    }
    head = f"# torchtitan {version}: {layout} on {layout.devices} devices"
    if flavor is None:
        width = f"{workload.model.layers} layers of width {workload.model.hidden}"
        head += f"\n# It has no flavor of {width}: state name and flavor of your own in [model]."
    return f"{head}\n{tomli_w.dumps(config).rstrip()}"


def without_unsaid(stack: Stack, model: Model, version: str) -> Stack:
    """The stack without what that version of torchtitan has no setting for, so that no plan for it chooses that."""
    if without_pipeline(model, version):
        stack = stack.model_copy(update={"pipeline_parallel": False})
    if version != "0.3":
        return stack
    kinds = tuple(kind for kind in stack.context_parallel if kind == "all_gather")
    return stack.model_copy(update={"context_parallel": kinds, "recompute_every": (1,), "expert_overlaps": ()})


def _training(layout: Layout, workload: Workload) -> dict[str, Any]:
    # A pipeline cuts its replica's whole batch into micro-batches; without one the batch accumulates.
    per_replica = workload.global_batch // layout.dp
    return {
        "local_batch_size": per_replica if layout.pp > 1 else layout.mbs,
        "global_batch_size": workload.global_batch,
        "seq_len": workload.seq_len,
        **({"dtype": "bfloat16"} if layout.precision == "bf16_pure" else {}),
        "mixed_precision_param": PRECISIONS[layout.precision].dtype,
        **({"enable_cpu_offload": True} if layout.offload == "weights" else {}),
    }


def _parallelism(layout: Layout, model: Model, split: tuple[int, ...], version: str) -> dict[str, Any]:
    sharded = layout.zero_stage == 3
    settings: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.size("replicate") if sharded else layout.dp,
        "data_parallel_shard_degree": layout.size("shard") if sharded else 1,
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.tp > 1 and not layout.sequence_parallel:
        settings["enable_sequence_parallel"] = False
    if layout.cp > 1:
        settings["context_parallel_degree"] = layout.cp
        if version == "0.2":
            settings["context_parallel_rotate_method"] = ROTATE_METHODS[layout.cp_kind]
    settings |= expert_settings(layout, model, version)
    return settings | stage_settings(layout, split, head="output" if version == "0.2" else "lm_head")


def _recompute(layout: Layout) -> dict[str, Any]:
    if layout.recompute == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    if layout.recompute == "full" and layout.recompute_every > 1:
        return {"mode": "selective", "selective_ac_option": str(layout.recompute_every)}
    return {"mode": layout.recompute}


def _compiled(layout: Layout, stack: Stack) -> dict[str, bool]:
    """What is compiled: all of a stack that is, and narrow products wherever; with TP piece by piece where it is so."""
    if not (stack.compiled or PRECISIONS[layout.precision].narrow is not None):
        return {}
    return {"enable": True, **({ASYNC_TP: True} if stack.sums_behind_products and layout.tp > 1 else {})}


def _narrow(layout: Layout, stack: Stack) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's converter to linear layers in fp8 or mxfp8, and a section on how these scale and gather."""
    if layout.precision == "mxfp8":
        return {"converters": ["quantize.linear.mx"]}, {}
    float8: dict[str, Any] = {"filter_fqns": ["output"]}
    if layout.precision == "fp8":
        gathers = stack.gathers_casts and layout.zero_stage == 3
        float8["enable_fsdp_float8_all_gather"] = gathers
        float8["precompute_float8_dynamic_scale_for_fsdp"] = gathers
    elif layout.precision == "fp8_rowwise":
        float8["recipe_name"] = "rowwise"
    else:
        return {}, {}
    return {"converters": ["quantize.linear.float8"]}, {"quantize": {"linear": {"float8": float8}}}
