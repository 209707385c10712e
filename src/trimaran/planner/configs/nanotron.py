"""nanotron's configuration (src/nanotron/config/ at 2411b02) as a layout; its models are Llama and Qwen 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from trimaran.files.hugging_face_config import model_from_config
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.nouns.precision import BY_DTYPE
from trimaran.nouns.text import quoted
from trimaran.planner.configs.settings import count, table, word
from trimaran.planner.configs.stated import Stated, optimizer_of

_SCHEDULES = {"afab": "gpipe", "1f1b": "1f1b"}
# Settings of the model beside its shape that make another one and that no step is counted with.
_BESIDE = ("sliding_window_size", "no_rope_layer", "rope_seq_len_interpolation_factor")


def is_nanotron(document: Mapping[str, Any]) -> bool:
    """Whether a file has nanotron's sections."""
    return all(isinstance(document.get(name), dict) for name in ("parallelism", "tokens", "model"))


def nanotron(document: Mapping[str, Any]) -> Stated:
    """What the configuration states, the rest as nanotron has it. Raises TrimaranError naming a setting."""
    stated = Stated("nanotron")
    parallelism, tokens, model, optimizer = (
        table(document, name) for name in ("parallelism", "tokens", "model", "optimizer")
    )
    _model(table(model, "model_config"), stated)
    sizes = {axis: count(parallelism, axis) or 1 for axis in ("tp", "pp")}
    layout = stated.layout
    layout |= {**sizes, "mbs": count(tokens, "micro_batch_size")}
    if layout["mbs"] is None:
        del layout["mbs"]
    stated.replicas = count(parallelism, "dp")
    if (cp := count(parallelism, "context_parallel_size") or 1) > 1:
        layout |= {"cp": cp, "cp_kind": "all_gather"}  # nn/llama3_ring_attention.py gathers keys and values by heads
    layout["zero_stage"] = count(optimizer, "zero_stage", least=0) or 0
    layout["sequence_parallel"] = str(parallelism.get("tp_mode", "ALL_REDUCE")).upper() == "REDUCE_SCATTER"
    layout["recompute"] = "full" if parallelism.get("recompute_layer") is True else "none"
    if sizes["pp"] > 1:
        layout["schedule"] = _SCHEDULES[word(parallelism, "pp_engine", "afab", _SCHEDULES)]
    precision = BY_DTYPE[word(model, "dtype", "bfloat16", BY_DTYPE)]
    if precision == "bf16" and optimizer.get("accumulate_grad_in_fp32") is False:
        precision = "bf16_pure"  # helpers.py: weights are held in fp32 where gradients are summed in it
    layout["precision"] = precision
    if (seq_len := count(tokens, "sequence_length")) is not None:
        stated.workload["seq_len"] = seq_len
    stated.batch_per_replica = (count(tokens, "micro_batch_size") or 1) * (
        count(tokens, "batch_accumulation_per_replica") or 1
    )
    factory = table(optimizer, "optimizer_factory")
    stated.workload["optimizer"] = optimizer_of(factory.get("name", "adamW"), stated)
    return stated


def _model(config: Mapping[str, Any], stated: Stated) -> None:
    """The model by Hugging Face's names, which nanotron's are."""
    if not config:
        return
    if config.get("moe_config") or config.get("moe_num_experts"):
        raise TrimaranError(
            "model_config has experts, of which nanotron's cost is not known: only dense models are read"
        )
    kind = "qwen2" if config.get("is_qwen2_config") and config.get("attention_bias") else "llama"
    known = {name: value for name, value in config.items() if name != "sliding_window_size"}
    try:
        model = model_from_config({**known, "model_type": kind, "_name_or_path": "model"}, "model_config")
    except ValidationError as error:
        raise TrimaranError(f"model_config: {first_error(error)}") from None
    stated.model = model.model_dump(exclude={"name"})
    for name in _BESIDE:
        if config.get(name) is not None:
            stated.uncounted.append(f"model_config.{name} {quoted(config[name])}")
