"""Trainers whose configurations are known by sight and read for no cost: what they state is told, and the way out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted


@dataclass(frozen=True)
class Other:
    """A trainer: settings by which a file is known as its, those that are told, and the stack nearest to it."""

    name: str
    marks: tuple[str, ...]
    told: tuple[str, ...]
    stack: str = "torch-fsdp"


_OTHERS = (
    Other(
        "axolotl",
        ("base_model", "micro_batch_size"),
        (
            "base_model", "adapter", "sequence_len", "micro_batch_size", "gradient_accumulation_steps", "dp_shard_size",
            "dp_replicate_size", "tensor_parallel_size", "context_parallel_size", "expert_parallel_size", "deepspeed",
            "gradient_checkpointing",
        ),
    ),
    Other(
        "LLaMA-Factory",
        ("model_name_or_path", "finetuning_type"),
        (
            "model_name_or_path", "finetuning_type", "cutoff_len", "per_device_train_batch_size",
            "gradient_accumulation_steps", "deepspeed", "tensor_model_parallel_size", "pipeline_model_parallel_size",
            "expert_model_parallel_size",
        ),
    ),
    Other(
        "torchtune",
        ("model._component_",),
        (
            "model._component_", "tokenizer.max_seq_len", "batch_size", "gradient_accumulation_steps", "dtype",
            "tensor_parallel_dim", "data_parallel_shard_dim", "context_parallel_dim", "enable_activation_checkpointing",
        ),
    ),
    Other(
        "a Hugging Face Trainer",
        ("per_device_train_batch_size",),
        ("model_name_or_path", "per_device_train_batch_size", "gradient_accumulation_steps", "fsdp", "deepspeed"),
    ),
    Other(
        "verl",
        ("actor_rollout_ref",),
        (
            "actor_rollout_ref.model.path", "data.train_batch_size", "actor_rollout_ref.actor.strategy",
            "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "trainer.n_gpus_per_node", "trainer.nnodes",
        ),
    ),
    Other(
        "NeMo RL",
        ("policy.model_name", "policy.train_global_batch_size"),
        (
            "policy.model_name", "policy.train_global_batch_size", "policy.train_micro_batch_size",
            "policy.max_total_sequence_length", "policy.precision", "policy.megatron_cfg.tensor_model_parallel_size",
            "policy.megatron_cfg.pipeline_model_parallel_size", "cluster.gpus_per_node", "cluster.num_nodes",
        ),
    ),
    Other(
        "LLM Foundry",
        ("max_seq_len", "global_train_batch_size"),
        (
            "model.name", "model.pretrained_model_name_or_path", "model.d_model", "model.n_layers", "max_seq_len",
            "global_train_batch_size", "device_train_microbatch_size", "precision", "fsdp_config.sharding_strategy",
            "fsdp_config.activation_checkpointing",
        ),
        "composer",
    ),
    Other(
        "OLMo-core",
        ("model.d_model", "model.n_layers"),
        ("model.d_model", "model.n_layers", "model.vocab_size", "train_module.rank_microbatch_size"),
        "torchtitan-0.2-compiled",
    ),
    Other(
        "OLMo",
        ("model.d_model", "model.n_heads"),
        ("model.d_model", "model.n_layers", "model.max_sequence_length", "global_train_batch_size",
         "device_train_microbatch_size"),
    ),
)  # fmt: skip
# Python is not run: by what a module imports, whose it is and what of it can be read.
_MODULES = (
    (r"megatron\.bridge", "Megatron-Bridge", "give the run_config.yaml that it writes beside a checkpoint"),
    (r"nemo(?:_run|\.collections)", "NeMo 2", "give what its command line writes by --to-yaml"),
    (r"olmo_core", "OLMo-core", "state its layout to trimaran plan by --why"),
    (r"(?:transformers|trl|accelerate)", "Hugging Face", "give accelerate's or DeepSpeed's configuration beside it"),
)


def refuse_other(document: Mapping[str, Any], what: str) -> None:
    """Raise TrimaranError where a file is another trainer's, with what it states, or a model and no training."""
    if {"model_type", "num_hidden_layers", "hidden_size"} <= document.keys():
        raise TrimaranError(f"{what} is a model's and states no training: give it by --model, to trimaran plan too")
    for other in _OTHERS:
        if any(_value(document, mark) is None for mark in other.marks):
            continue
        states = [f"{name} {quoted(value)}" for name in other.told if (value := _value(document, name)) is not None]
        by_megatron = any("megatron" in state for state in states)
        stack = "deepspeed" if document.get("deepspeed") else "megatron-core" if by_megatron else other.stack
        raise TrimaranError(
            f"{what} is {other.name}'s, which is read for no cost; it states {', '.join(states)}: ask for its layout "
            f"by trimaran plan --model config.json --cluster C --gbs N --stack {stack} --why LAYOUT"
        )


def refuse_adapters(document: Any, what: str, path: str = "") -> None:
    """Raise TrimaranError where NeMo or Megatron-Bridge trains adapters beside weights that stay as they are."""
    for name, value in document.items() if isinstance(document, Mapping) else ():
        named = f"{path}.{name}".lstrip(".")
        if name != "peft":
            refuse_adapters(value, what, named)
            continue
        scheme = value.get("peft_scheme", value.get("_target_")) if isinstance(value, Mapping) else value
        if scheme and str(scheme).lower() not in ("none", "null"):
            raise TrimaranError(
                f"{what} trains adapters alone, {named} {quoted(scheme)}: no cost is known of that; leave {named} out "
                f"for what training all weights would cost"
            )


def refuse_module(source: str, what: str) -> None:
    """Raise TrimaranError where a Python module is another trainer's, which is not run."""
    for pattern, name, way_out in _MODULES:
        if re.search(rf"^\s*(?:from|import)\s+{pattern}\b", source, flags=re.MULTILINE):
            raise TrimaranError(f"{what} is a program of {name}, which is not run: {way_out}")


def _value(document: Any, path: str) -> Any:
    """A setting by its path, None where it is not there."""
    for name in path.split("."):
        document = document.get(name) if isinstance(document, Mapping) else None
    return document
