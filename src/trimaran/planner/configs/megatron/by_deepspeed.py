"""Arguments that Megatron-DeepSpeed has beside Megatron-LM's (its megatron/arguments.py)."""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import FlashKernel
from trimaran.planner.configs.flags import Flags
from trimaran.planner.configs.stated import Stated

DEEPSPEED_GROUPS = "--num-key-value-heads"
_SEQUENCE, _INTERVAL = "--ds-sequence-parallel-size", "--expert-interval"
_USUAL_INTERVAL, _USUAL_CAPACITY = 2, 1.0
# Of BigScience's, a norm behind the embedding, which BLOOM has (megatron/arguments.py at its main).
_EMBEDDING_NORM = "--embed-layernorm"
# Whose attention in one kernel that is (megatron/arguments.py:927 to 935 at deepspeedai/Megatron-DeepSpeed 4efb479).
_KERNELS: Mapping[str, FlashKernel] = {
    "--use-flash-attn": "flash", "--use-flash-attn-v1": "flash", "--use-flash-attn-v2": "flash",
    "--use-flash-attn-builder": "flash", "--use-flash-attn-triton": "triton",
}  # fmt: skip
# What changes time or memory and what the cost model has no word for.
_UNCOUNTED = (
    "--ds-sequence-parallel-fpdt", "--ds-sequence-parallel-fpdt-offloading", "--ds-sequence-parallel-fpdt-chunk-size",
    "--use-tutel", "--partition-activations", "--checkpoint-in-cpu", "--contigious-checkpointing",
)  # fmt: skip
# What no step feels: losses and evaluation of experts, and what their training cannot do without.
_OF_EXPERTS = (
    "--moe-loss-coeff", "--moe-eval-capacity-factor", "--moe-min-capacity", "--create-moe-param-group",
    "--disable-moe-top2-2nd-expert-sampling",
)  # fmt: skip
# Numbers of the model by names that Megatron-LM has others for.
_RENAMED: Mapping[str, str] = {
    "--rotary-position-embeddings-theta": "rotary_theta", "--layernorm-epsilon": "norm_epsilon",
}  # fmt: skip
_OF_TODAY = "megatron-deepspeed-2025"


def by_deepspeed(flags: Flags, stated: Stated) -> None:
    """State what DeepSpeed's engine is asked for. Raises TrimaranError for what no layout can say."""
    layout = stated.layout
    if layout["zero_stage"] == 0 and not flags.has("--zero-stage"):
        stated.notes.append(
            "--zero-stage is not stated: no stage is counted, whatever DeepSpeed's own configuration says"
        )
    if layout["zero_stage"] == 0 and flags.has("--bf16"):
        # its BF16_Optimizer shares states out by itself (deepspeed/runtime/bf16_optimizer.py)
        layout["zero_stage"] = 1
        stated.notes.append("in bf16 DeepSpeed shares optimizer states out as under ZeRO 1, whatever the stage says")
    for flag, field in _RENAMED.items():
        if (number := flags.number(flag)) is not None and stated.model:
            stated.model[field] = number
    if (degree := flags.degree(_SEQUENCE)) > 1:
        layout |= {"cp": degree, "cp_kind": "ulysses"}
    kernels = [kernel for flag, kernel in _KERNELS.items() if flags.has(flag)]
    mixed = (flags.count("--num-experts") or 1) > 1
    if kernels or degree > 1 or mixed or layout["zero_stage"] in (2, 3):
        stated.stack_name = _OF_TODAY
        stated.stack["flash_attention"] = bool(kernels)
        stated.stack |= {"flash_kernel": kernels[-1]} if kernels else {}
    if flags.has(_EMBEDDING_NORM) and stated.model:
        stated.model["embedding_norm"] = True
    if flags.has("--cpu-optimizer"):
        layout["offload"] = "optimizer"
    if flags.has("--enable-zbh1-pipeline") or flags.has("--enable-zbh1-exact-semantics"):
        layout["schedule"] = "zero_bubble"
    flags.has("--no-pipeline-parallel")  # of one stage, which needs no engine of pipelines
    ep = flags.degree("--moe-expert-parallel-size")
    for flag in _OF_EXPERTS:
        flags.has(flag)
    if mixed:
        _mixture(flags, stated)
        layout["ep"] = ep
    stated.uncounted += [flag for flag in _UNCOUNTED if flags.has(flag)]


def _mixture(flags: Flags, stated: Stated) -> None:
    """Experts in the last of so many layers (get_num_experts_per_layer), with a capacity unless no token is dropped."""
    model, tp = stated.model, stated.layout["tp"]
    if len(set(numbers := flags.words("--num-experts"))) > 1:
        raise TrimaranError(f"--num-experts is {' '.join(numbers)}: only one number for all layers can be said here")
    if (interval := flags.count(_INTERVAL)) is None:
        stated.notes.append(
            f"{_INTERVAL} is not stated: every second layer has experts, as Megatron-DeepSpeed takes it"
        )
    model["experts_every"] = _USUAL_INTERVAL if interval is None else interval
    model["top_k"] = flags.degree("--topk")
    if flags.word("--mlp-type", ("standard", "residual")) == "residual":
        model["shared_experts"] = 1
        stated.notes.append("the MLP beside experts (--mlp-type residual) is counted as a shared expert")
    capacity = flags.number("--moe-train-capacity-factor")
    if not flags.has("--disable-moe-token-dropping"):
        stated.workload["capacity_factor"] = _USUAL_CAPACITY if capacity is None else capacity
    stated.layout |= {"etp": tp if flags.has("--enable-expert-tensor-parallelism") else 1, "dispatcher": "alltoall"}
