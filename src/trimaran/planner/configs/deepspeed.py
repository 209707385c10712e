"""A DeepSpeed configuration (deepspeed/runtime/config.py of 0.19.8) as a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted
from trimaran.planner.configs.settings import count, table
from trimaran.planner.configs.stated import Stated, optimizer_of

_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# What makes a layout that cannot be said, unless it is 1; and what is not counted, unless it is none.
_AT_ONE = ("zero_hpz_partition_size",)
# Elements of ZeRO's buckets, and parameters that stage 3 keeps gathered ahead and behind; a file may write 5e8.
_SIZES = {
    "reduce_bucket_size": "bucket_elements",
    "stage3_max_live_parameters": "live_parameters",
    "stage3_max_reuse_distance": "reuse_parameters",
}
_MOST = 1e15
# In the order in which one includes the other, each with its deprecated name (deepspeed/runtime/zero/config.py).
_OFFLOADS = (("offload_optimizer", "cpu_offload", "optimizer"), ("offload_param", "cpu_offload_param", "weights"))
_KNOWN = {
    *_BATCHES, "sequence_parallel_size", "tensor_parallel", "expert_parallel", "bf16", "fp16", "bfloat16", "optimizer",
    "data_types", "zero_allow_untested_optimizer",
}  # fmt: skip
# Of ZeRO what is read, and what no step can feel.
_KNOWN_ZERO = {
    *_AT_ONE, *(name for names in _OFFLOADS for name in names[:2]), "stage", "mics_shard_size", "overlap_comm",
    *_SIZES, "load_from_fp32_weights", "elastic_checkpoint", "ignore_unused_parameters",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
    "gather_16bit_weights_on_model_save", "log_trace_cache_warnings", "enable_sanity_checks",
}  # fmt: skip
# Settings of ZeRO that say nothing while they are as DeepSpeed has them.
_USUAL_ZERO = {
    "contiguous_gradients": True, "reduce_scatter": True, "allgather_partitions": True,
    "use_multi_rank_bucket_allreduce": True, "round_robin_gradients": False, "legacy_stage1": False,
    "zero_quantized_weights": False, "zero_quantized_gradients": False, "zero_quantized_nontrainable_weights": False,
}  # fmt: skip


def is_deepspeed(document: Mapping[str, Any]) -> bool:
    """Whether a file has a setting that every configuration of DeepSpeed has some of."""
    return any(name in document for name in ("zero_optimization", *_BATCHES))


def deepspeed(config: Mapping[str, Any]) -> Stated:
    """What the configuration states; PP and the model are not in it. Raises TrimaranError naming a setting."""
    stated = Stated("deepspeed")
    zero = table(config, "zero_optimization")
    batch, mbs, steps = (_count(config, name, stated) for name in _BATCHES)
    for name in _AT_ONE:
        if (_count(zero, name, stated, least=-1) or 1) > 1:
            raise TrimaranError(f"{name} is {zero[name]}, and only 1 can be said here: no cost is known of it")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise TrimaranError(f"zero_optimization.stage is {quoted(str(stage))}, expected 0 to 3")
    # runtime/tensor_parallel/config.py and module_inject/auto_ep_config.py: 0 and 1 leave layers as they are
    tp = _count(table(config, "tensor_parallel"), "autotp_size", stated, least=0) or 1
    stated.layout |= {"tp": tp, "pp": 1, "zero_stage": stage, "precision": (precision := _precision(config))}
    if table(config, precision).get("enabled") == "auto":
        stated.open.append(f"{precision}.enabled is auto, which Hugging Face's Trainer fills in: it is counted as on")
    experts = table(config, "expert_parallel")
    if experts.get("enabled") is True and (ep := _count(experts, "autoep_size", stated) or 1) > 1:
        stated.layout["ep"] = ep
    if (ulysses := _count(config, "sequence_parallel_size", stated) or 1) > 1:
        stated.layout |= {"cp": ulysses, "cp_kind": "ulysses"}
    shard = _count(zero, "mics_shard_size", stated, least=-1) or -1
    if stage == 3 and shard > 0:
        stated.layout["shard"] = shard
    if stage == 3:
        stated.layout["dp_kind"] = "fully_sharded"
    _batches(batch, mbs, steps, stated)
    # runtime/config.py, _set_batch_related_parameters: a batch makes the micro-batch, in one step unless told otherwise
    if mbs is None and config.get("gradient_accumulation_steps") != "auto":
        is_alone = batch is not None and config.get("train_micro_batch_size_per_gpu") != "auto"
        stated.steps = steps or (1 if is_alone else None)
    _engine(config, zero, stated)
    stated.unread = [name for name in config if name not in _KNOWN and name != "zero_optimization"]
    stated.unread += [
        f"zero_optimization.{name}"
        for name, value in zero.items()
        if name not in _KNOWN_ZERO and not (name in _USUAL_ZERO and value == _USUAL_ZERO[name])
    ]
    return stated


def _engine(config: Mapping[str, Any], zero: Mapping[str, Any], stated: Stated) -> None:
    """Optimizer, overlap, buckets and offload."""
    stated.workload["optimizer"] = optimizer_of(table(config, "optimizer").get("type", "Adam"), stated)
    if stated.layout["zero_stage"] and "overlap_comm" in zero:
        stated.stack["overlapped_zero_stages"] = (stated.layout["zero_stage"],) if zero["overlap_comm"] is True else ()
    # engine.py:1259: unless told otherwise gradients are summed in the model's precision
    if stated.layout["zero_stage"] == 1 and table(config, "data_types").get("grad_accum_dtype") not in (
        "fp32",
        "float32",
    ):
        stated.stack["wide_gradients"] = ()
    bf16 = table(config, "bf16")
    if bf16.get("bf16_master_weights_and_grads") is True:
        stated.stack |= {"master_weight_bytes": 2, "wide_gradients": ()}
    if bf16.get("bf16_optimizer_states") is True:
        stated.stack["moment_bytes_16bit"] = 2.0
    for name, field in _SIZES.items():
        size = zero.get(name)
        if isinstance(size, int | float) and not isinstance(size, bool) and 0 <= size < _MOST:
            stated.stack[field] = int(size)
    for name, deprecated, word in _OFFLOADS:
        section = table(zero, name) if isinstance(zero.get(name), dict) else {"device": zero.get(name)}
        device = "cpu" if zero.get(deprecated) is True else section.get("device", "none")
        if device == "cpu":
            stated.layout["offload"] = word
            if section.get("ratio", 1) != 1:
                stated.uncounted.append(f"zero_optimization.{name}.ratio {section['ratio']}, counted as 1")
        elif device not in (None, "none", False):
            stated.uncounted.append(f"zero_optimization.{name}")


def _batches(batch: int | None, mbs: int | None, steps: int | None, stated: Stated) -> None:
    """Of batch, micro-batch and steps two make the third, with the replicas (_configure_train_batch_size)."""
    if batch is not None:
        stated.workload["global_batch"] = batch
    if mbs is None:
        return
    stated.layout["mbs"] = mbs
    if batch is None:
        stated.batch_per_replica = mbs * (steps or 1)
    elif steps is not None:
        if batch % (mbs * steps):
            raise TrimaranError(
                f"train_batch_size {batch} is not a multiple of train_micro_batch_size_per_gpu {mbs} x "
                f"gradient_accumulation_steps {steps}"
            )
        stated.replicas = batch // (mbs * steps)


def _precision(config: Mapping[str, Any]) -> str:
    on = [name for name in ("bf16", "bfloat16", "fp16") if table(config, name).get("enabled") in (True, "auto")]
    if table(config, "bf16").get("enabled") is True or "bfloat16" in on:
        return "bf16"
    return on[0] if on else "fp32"


def _count(config: Mapping[str, Any], name: str, stated: Stated, least: int = 1) -> int | None:
    if config.get(name) == "auto":
        stated.open.append(f"{name} is auto, which Hugging Face's Trainer fills in")
        return None
    return count(config, name, least)
