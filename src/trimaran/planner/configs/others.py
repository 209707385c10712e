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
        stack = "deepspeed" if document.get("deepspeed") else other.stack
        raise TrimaranError(
            f"{what} is {other.name}'s, which is read for no cost; it states {', '.join(states)}: ask for its layout "
            f"by trimaran plan --model config.json --cluster C --gbs N --stack {stack} --why LAYOUT"
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
