"""What replicas share out under Megatron-FSDP, all of it unless told otherwise (core_v0.19.0), or PyTorch's FSDP."""

from __future__ import annotations

from trimaran.planner.configs.flags import Flags
from trimaran.planner.configs.stated import Stated
from trimaran.planner.export.megatron_words import (
    ACCUMULATED_APART,
    BY_TORCH,
    DOUBLE_BUFFER,
    FSDP,
    SHARDED,
    SHARDING,
    TORCH_FSDP2,
)

_STACK = "megatron-core-fsdp"
_WHOLLY = "optim_grads_params"
_AHEAD = "--suggested-communication-unit-size"
_SUMMED, _SENT = "--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype"
_OF_MODEL, _WIDE = "auto", "fp32"
_TYPES = (_WIDE, "bf16", "fp16", _OF_MODEL)


def sharded(flags: Flags, stated: Stated) -> None:
    """State ZeRO's stage and what FSDP does beside a layer's work; raises TrimaranError for a word it does not have."""
    layout = stated.layout
    if flags.has(FSDP) or flags.has("--use-custom-fsdp"):
        strategy = flags.word(SHARDING, SHARDED)
        layout["zero_stage"] = stage = SHARDED[strategy or _WHOLLY]
        if strategy is None:
            stated.notes.append(f"{SHARDING} is not stated: {_WHOLLY}, as core 0.19 takes it")
        flags.has("--init-model-with-meta-device")  # goes with it
        flags.has("--fsdp-manual-registration")  # the same
        if stage > 1:
            stated.stack_name = _STACK
            _megatron_fsdp(flags, stated)
    elif flags.has(BY_TORCH):
        layout["zero_stage"] = 2 if flags.has("--torch-fsdp2-no-reshard-after-forward") else 3
        stated.stack_name = TORCH_FSDP2
        # megatron/training/arguments.py at d98e8a6, lines 1040 and 1052: without either, whatever is asked
        stated.stack |= {"overlap_dp": 1.0, "gathers_behind_forward": True, "fused_accumulation": "never"}
        stated.stack |= {"grad_bytes_16bit": 2, "gathers_casts": False}
    else:
        flags.has(SHARDING)  # which does nothing then
    if layout["zero_stage"] == 3:
        layout["dp_kind"] = "fully_sharded"


def _megatron_fsdp(flags: Flags, stated: Stated) -> None:
    # megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py at d98e8a6, line 328: whatever is asked
    stated.stack |= {"overlap_dp": 1.0, "gathers_behind_forward": True}
    stated.stack["fused_accumulation"] = "never" if flags.has(ACCUMULATED_APART) else "always"
    main, sent = flags.word(_SUMMED, _TYPES), flags.word(_SENT, _TYPES)
    narrow = flags.has("--grad-reduce-in-bf16")
    if main is None and not narrow:
        stated.notes.append(
            f"{_SUMMED} is not stated: gradients are summed in the precision of weights, as in core 0.20"
        )
    stated.stack["grad_bytes_16bit"] = 4 if main == _WIDE and not narrow else 2
    stated.stack["narrow_gradient_stages"] = (2, 3) if narrow or sent in ("bf16", "fp16") else ()
    # megatron_fsdp/param_and_grad_buffer.py, need_skip_prefetch: two places hold two layers
    both = [flags.has(flag) for flag in (DOUBLE_BUFFER, "--use-nccl-ub", "--nccl-ub")]
    if any(both):
        stated.stack["live_parameters"] = 0
    elif (size := flags.count(_AHEAD)) is not None:
        stated.stack["live_parameters"] = size // 2
    outer = flags.word("--outer-dp-sharding-strategy", ("no_shard", "optim"))
    if outer == "optim":
        stated.uncounted.append("--outer-dp-sharding-strategy optim, counted as no_shard")
