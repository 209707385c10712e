"""Names of torchtitan's settings that are read or that no step can feel.

By config/job_config.py of 0.1.0 to 0.2.2, and config/configs.py since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trimaran.planner.export.torchtitan import ASYNC_TP
from trimaran.planner.export.torchtitan_stages import LESS

# Sections of what is done beside the steps, and those that do nothing until they are switched on.
_BESIDE = frozenset({"job", "metrics", "checkpoint", "profiling", "comm", "logging", "lr_scheduler"})
_OFF = frozenset({"validation", "memory_estimation", "fault_tolerance"})
_FLOAT8 = "recipe_name enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp filter_fqns"
_KNOWN: Mapping[str, frozenset[str]] = {
    section: frozenset(names.split())
    for section, names in {
        "model": "name flavor converters hf_assets_path tokenizer_path print_after_conversion",
        "optimizer": "name lr beta1 beta2 eps weight_decay",
        "training": (
            "local_batch_size global_batch_size seq_len max_context_length num_tokens_per_microbatch_per_dp_rank "
            "num_tokens_per_train_step dtype mixed_precision_param mixed_precision_reduce "
            "enable_cpu_offload compile dataset dataset_path steps max_norm gc_freq seed"
        ),
        "parallelism": (
            "data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree "
            "pipeline_parallel_degree pipeline_parallel_schedule pipeline_parallel_microbatch_size "
            "num_pp_microbatches pipeline_parallel_layers_per_stage module_fqns_per_model_part "
            "pipeline_parallel_expert_parallel_overlap context_parallel_degree context_parallel_rotate_method "
            "expert_parallel_degree expert_tensor_parallel_degree expert_parallel_comm_backend "
            f"enable_sequence_parallel fsdp_reshard_after_forward {ASYNC_TP} {' '.join(LESS)}"
        ),
        "loss": "num_chunks",
        "activation_checkpoint": "mode selective_ac_option",
        "compile": f"enable components {ASYNC_TP}",
        "float8": _FLOAT8,
        "quantize.linear.float8": _FLOAT8,
        "mx": "filter_fqns",
        "quantize.linear.mx": "filter_fqns",
        "quantize.grouped_mm.float8": "fqns",
        "quantize.grouped_mm.mx": "fqns",
    }.items()
}
# Settings that say nothing while they are as torchtitan has them.
_USUAL: Mapping[str, object] = {
    "training.deterministic": False,
    "training.gc_debug": False,
    "training.disable_cuda_graphs": True,
    "parallelism.disable_loss_parallel": False,
    "parallelism.enable_compiled_autograd": False,
    "optimizer.implementation": "fused",
    "optimizer.early_step_in_backward": False,
    "compile.backend": "inductor",
}


def unread(sections: Mapping[str, Any]) -> Iterator[str]:
    """The settings, each after its section, that are not read and that a step may feel."""
    for name, table in sections.items():
        if name in _BESIDE or (name in _OFF and isinstance(table, dict) and not _enabled(table)):
            continue
        for section, key, value in _leaves(name, table):
            path = f"{section}.{key}" if section else key
            if key not in _KNOWN.get(section, ()) and not (path in _USUAL and value == _USUAL[path]):
                yield path


def _enabled(table: Mapping[str, Any]) -> bool:
    return any(table.get(word, False) is not False for word in ("enable", "enabled"))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(f"{path}.{name}", each)
    else:
        section, _, key = path.rpartition(".")
        yield section, key, value
