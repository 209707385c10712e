"""What `accelerate config` writes: what is sharded, by how many (accelerate 16cb6eb, commands/config/config_args.py).

The model, its sequences and batches are the script's that it starts, and stated by options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted
from trimaran.planner.configs.deepspeed import deepspeed
from trimaran.planner.configs.settings import count, table, word
from trimaran.planner.configs.stated import Stated
from trimaran.planner.export.torchtitan import ROTATE_METHODS

_PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
# torch.distributed.fsdp.ShardingStrategy by its words and numbers (accelerate/utils/constants.py): ZeRO's stage, and
# whether a node's devices share alone.
_STRATEGIES = {
    "FULL_SHARD": (3, False), "SHARD_GRAD_OP": (2, False), "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True), "HYBRID_SHARD_ZERO2": (2, True),
}  # fmt: skip
_NUMBERED = {str(number): word for number, word in enumerate(_STRATEGIES, start=1)}
_KINDS = ("FSDP", "DEEPSPEED", "MULTI_GPU", "NO")


def is_accelerate(document: Mapping[str, Any]) -> bool:
    """Whether a file is one that accelerate launches by."""
    return "distributed_type" in document


def accelerate(document: Mapping[str, Any]) -> Stated:
    """What the configuration states. Raises TrimaranError naming a setting."""
    kind = word(document, "distributed_type", "NO", _KINDS)
    stated = _by_deepspeed(document) if kind == "DEEPSPEED" else Stated("accelerate")
    stated.devices = count(document, "num_processes")
    mixed = word(document, "mixed_precision", "no", _PRECISIONS)
    if kind != "DEEPSPEED" or mixed != "no":
        stated.layout["precision"] = _PRECISIONS[mixed]
    stated.open.append("model, sequences and batches are those of the script that accelerate starts")
    # config_args.py: older files state the backend beside the others
    compiler = table(document, "dynamo_config").get("dynamo_backend") or document.get("dynamo_backend") or "NO"
    if str(compiler).upper() != "NO":
        stated.uncounted.append(f"dynamo_backend {compiler}: layers are counted as not compiled")
    if kind == "DEEPSPEED":
        _degrees(table(document, "parallelism_config"), stated)
        return stated
    stated.layout |= {"tp": 1, "pp": 1, "zero_stage": 0}
    stated.notes.append("counted as under PyTorch's FSDP with Composer's models: norms of Hugging Face's take longer")
    if kind == "FSDP":
        _sharded(table(document, "fsdp_config"), document, stated)
    _degrees(table(document, "parallelism_config"), stated)
    return stated


def _by_deepspeed(document: Mapping[str, Any]) -> Stated:
    config = table(document, "deepspeed_config")
    if file := config.get("deepspeed_config_file"):
        raise TrimaranError(f"deepspeed_config_file is {quoted(file)}, which says what is trained: give that file")
    zero = {"stage": config.get("zero_stage", 2)}
    for what in ("optimizer", "param"):
        zero[f"offload_{what}"] = {"device": config.get(f"offload_{what}_device", "none")}
    steps = config.get("gradient_accumulation_steps")
    return deepspeed({"zero_optimization": zero, "gradient_accumulation_steps": steps})


def _sharded(config: Mapping[str, Any], document: Mapping[str, Any], stated: Stated) -> None:
    if config.get("fsdp_version") == 2:
        stage, by_node = (3 if config.get("fsdp_reshard_after_forward", True) is not False else 2), False
    else:
        stated_word = str(config.get("fsdp_sharding_strategy", "FULL_SHARD"))
        strategy = _NUMBERED.get(stated_word, stated_word)
        if strategy not in _STRATEGIES:
            raise TrimaranError(
                f"fsdp_sharding_strategy is {quoted(stated_word)}: it is one of {', '.join(_STRATEGIES)}"
            )
        stage, by_node = _STRATEGIES[strategy]
    stated.layout["zero_stage"] = stage
    if stage == 3:
        stated.layout["dp_kind"] = "fully_sharded"
    if by_node:
        stated.replicate = count(document, "num_machines") or 1
    stated.layout["recompute"] = "full" if config.get("fsdp_activation_checkpointing") is True else "none"
    if config.get("fsdp_offload_params") is True:
        stated.layout["offload"] = "weights"


def _degrees(config: Mapping[str, Any], stated: Stated) -> None:
    """Degrees of accelerate 1.10 and later (accelerate/parallelism_config.py).

    DeepSpeed's way to share sequences is Ulysses, which 1.11 called a backend of `cp` and later ones `sp`. Its replicas
    share out all, however many are said to replicate.
    """
    axes = ("tp", "cp", "sp", "dp_replicate")
    sizes = {axis: count(config, f"parallelism_config_{axis}_size") or 1 for axis in axes}
    stated.layout["tp"] = sizes["tp"]
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        both = f"cp_size is {sizes['cp']} and sp_size {sizes['sp']}"
        raise TrimaranError(f"parallelism_config: {both}, but a sequence is shared out in one way: set one to 1")
    by_deepspeed = word(config, "parallelism_config_cp_backend", "torch", ("torch", "deepspeed")) == "deepspeed"
    if sizes["sp"] > 1 or (sizes["cp"] > 1 and by_deepspeed):
        stated.layout |= {"cp": max(sizes["sp"], sizes["cp"]), "cp_kind": "ulysses"}
    elif sizes["cp"] > 1:
        words = {method: kind for kind, method in ROTATE_METHODS.items()}
        strategy = word(config, "parallelism_config_cp_comm_strategy", ROTATE_METHODS["all_gather"], words)
        stated.layout |= {"cp": sizes["cp"], "cp_kind": words[strategy]}
    if sizes["dp_replicate"] > 1 and stated.trainer != "deepspeed":
        stated.replicate = sizes["dp_replicate"]
