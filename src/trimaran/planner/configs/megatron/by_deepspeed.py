"""Arguments that Megatron-DeepSpeed has beside Megatron-LM's (its megatron/arguments.py)."""

from __future__ import annotations

from trimaran.nouns.noun import TrimaranError
from trimaran.planner.configs.flags import Flags
from trimaran.planner.configs.stated import Stated

DEEPSPEED_GROUPS = "--num-key-value-heads"
_SEQUENCE, _INTERVAL = "--ds-sequence-parallel-size", "--expert-interval"
_USUAL_INTERVAL = 2
# Of BigScience's, a norm behind the embedding, which BLOOM has (megatron/arguments.py at its main).
_EMBEDDING_NORM = "--embed-layernorm"
# What changes time or memory and what the cost model has no word for.
_UNCOUNTED = (
    "--use-flash-attn", "--use-flash-attn-v1", "--use-flash-attn-v2", "--use-flash-attn-triton",
    "--use-flash-attn-builder", "--ds-sequence-parallel-fpdt", "--ds-sequence-parallel-fpdt-offloading",
    "--partition-activations", "--checkpoint-in-cpu", "--contigious-checkpointing",
)  # fmt: skip


def by_deepspeed(flags: Flags, stated: Stated) -> None:
    """State what DeepSpeed's engine is asked for. Raises TrimaranError for what no layout can say."""
    layout = stated.layout
    if layout["zero_stage"] == 0 and flags.has("--bf16"):
        # its BF16_Optimizer shares states out by itself (deepspeed/runtime/bf16_optimizer.py)
        layout["zero_stage"] = 1
        stated.notes.append("in bf16 DeepSpeed shares optimizer states out as under ZeRO 1, whatever the stage says")
    if (degree := flags.degree(_SEQUENCE)) > 1:
        layout |= {"cp": degree, "cp_kind": "ulysses"}
    if flags.has(_EMBEDDING_NORM) and stated.model:
        stated.model["embedding_norm"] = True
    if flags.has("--cpu-optimizer"):
        layout["offload"] = "optimizer"
    if flags.has("--enable-zbh1-pipeline") or flags.has("--enable-zbh1-exact-semantics"):
        layout["schedule"] = "zero_bubble"
    flags.has("--no-pipeline-parallel")  # of one stage, which needs no engine of pipelines
    ep = flags.degree("--moe-expert-parallel-size")
    if (flags.count("--num-experts") or 1) > 1:
        _mixture(flags, stated)
        layout["ep"] = ep
    stated.uncounted += [flag for flag in _UNCOUNTED if flags.has(flag)]


def _mixture(flags: Flags, stated: Stated) -> None:
    interval = flags.count(_INTERVAL)
    if (interval or _USUAL_INTERVAL) != 1:
        said = "not stated, which means 2" if interval is None else str(interval)
        raise TrimaranError(f"{_INTERVAL} is {said}: only experts in every layer (1) can be said here")
    stated.model["top_k"] = flags.degree("--topk")
