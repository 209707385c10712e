"""What gradients, moments and master copies are held in under the precision-aware optimizer (core_v0.19.0)."""

from __future__ import annotations

from trimaran.nouns.text import quoted
from trimaran.planner.configs.flags import Flags
from trimaran.planner.configs.stated import Stated
from trimaran.planner.export.megatron_words import CHOSEN_PRECISION

_GRADIENTS, _MASTER = "--main-grads-dtype", "--main-params-dtype"
_MOMENTS = ("--exp-avg-dtype", "--exp-avg-sq-dtype")
# Bytes of an element, by Megatron-LM's words and PyTorch's, which files in YAML have.
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


def states(flags: Flags, stated: Stated) -> None:
    """State what the stack holds in fewer bytes than usual.

    Without the precision-aware optimizer all is held in fp32 whatever else is stated, and what lies on the host is too.
    Megatron-FSDP and PyTorch's hold gradients and master copies by means of their own.
    """
    chosen = flags.has(CHOSEN_PRECISION)
    gradients, master, *moments = (_bytes(flags, stated, flag) for flag in (_GRADIENTS, _MASTER, *_MOMENTS))
    if not chosen:
        return
    # megatron/training/arguments.py, validate_args: gradients are then summed in the precision of weights
    if gradients == 2 and not stated.stack_name:
        stated.stack["grad_bytes_16bit"] = 2
    if stated.layout.get("offload") == "optimizer":
        return
    stated.stack["moment_bytes_16bit"] = sum(moments) / len(moments)
    # megatron/core/optimizer/__init__.py, store_param_remainders: of a copy in fp32 the 16 bit that one in bf16 lacks
    is_rest = stated.layout["precision"] != "fp16" and not flags.has("--fp8-param-gather")
    if not stated.stack_name:
        stated.stack["master_weight_bytes"] = 2 if is_rest else master


def _bytes(flags: Flags, stated: Stated, flag: str) -> int:
    """Those of an element; of a type that is not known as in fp32."""
    word = (flags.word(flag) or "fp32").removeprefix("torch.")
    if word not in _BYTES:
        stated.uncounted.append(f"{flag} {quoted(word)}, counted as fp32")
    return _BYTES.get(word, 4)
