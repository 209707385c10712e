"""Megatron-LM's words for mixtures of experts, latent attention and the axes that come with long sequences and experts.

From megatron/training/arguments.py and megatron/core/transformer/transformer_config.py at core_v0.19.0, which exports
write and imports of configurations read back.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.layout.layout import Layout
from trimaran.nouns.dispatcher import DispatcherName
from trimaran.nouns.model import Model
from trimaran.nouns.stack import ContextParallelKind, ExpertOverlap
from trimaran.nouns.workload import Workload
from trimaran.planner.export.megatron_yarn import YARN

EXPERT_SIZES: Mapping[str, str] = {
    "--num-experts": "experts",
    "--moe-router-topk": "top_k",
    "--moe-ffn-hidden-size": "moe_ffn_hidden",
}
# Groups of experts that a token first chooses from.
EXPERT_GROUPS: Mapping[str, str] = {
    "--moe-router-num-groups": "expert_groups",
    "--moe-router-group-topk": "top_groups",
}
SCORES, SOFTMAX_OVER_ALL = "--moe-router-score-function", "--moe-router-pre-softmax"
SCORE_SCALE, EXPERT_BIAS = "--moe-router-topk-scaling-factor", "--moe-router-enable-expert-bias"
SHARED_WIDTH = "--moe-shared-expert-intermediate-size"
# Core 0.15 has no option for it (transformer_config.py, moe_shared_expert_gate, from core_v0.16.0 on).
SHARED_GATE, WITHOUT_SHARED_GATE = "--moe-shared-expert-gate", ("0.15",)
LAYER_KINDS = "--moe-layer-freq"
CAPACITY = "--moe-expert-capacity-factor"
LATENT = "--multi-latent-attention"
LATENT_SIZES: Mapping[str, str] = {
    "--q-lora-rank": "query_rank",
    "--kv-lora-rank": "kv_rank",
    "--qk-head-dim": "plain_dim",
    "--qk-pos-emb-head-dim": "rotary_dim",
    "--v-head-dim": "value_dim",
}
CONTEXT_KINDS: Mapping[ContextParallelKind, str] = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}
DISPATCHER_TYPE, FLEX_BACKEND, OLD_FLEX = (
    "--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend", "--moe-enable-deepep",
)  # fmt: skip
# The type of a dispatcher, and the backend where it is a fused kernel's.
DISPATCHERS: Mapping[DispatcherName, tuple[str, str]] = {
    "allgather": ("allgather", ""),
    "alltoall": ("alltoall", ""),
    "deepep": ("flex", "deepep"),
    "hybridep": ("flex", "hybridep"),
}
# What hides exchanges; gradients of weights are put off so that they hide those of the backward.
OVERLAPS: Mapping[ExpertOverlap, tuple[str, ...]] = {
    "none": (),
    "shared": ("--moe-shared-expert-overlap",),
    "batch": ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"),
}
# The one whose fused dispatcher is a switch, of DeepEP alone (core_v0.15.0, megatron/training/arguments.py).
DEEPEP_ALONE = ("0.15",)
# Those whose shared experts hide no exchange of a fused dispatcher (transformer_config.py, __post_init__).
SHARED_BESIDE_ALLTOALL = ("0.17", "0.16", "0.15")
# The one that has experts in bf16 alone (core_v0.15.0, megatron/training/arguments.py, validate_args).
EXPERTS_IN_BF16 = ("0.15",)
MIXTURE_TRAITS = (
    "experts", "top_k", "moe_ffn_hidden", "shared_experts", "dense_layers", "experts_every", "latent_attention",
    "expert_groups", "top_groups", "router", "shared_gate",
)  # fmt: skip


def mixture_flags(workload: Workload) -> list[str]:
    """Experts, those that every token goes to, layers without any, and how many tokens one takes."""
    model = workload.model
    if not model.experts:
        return []
    flags = [f"{flag} {getattr(model, field)}" for flag, field in EXPERT_SIZES.items()]
    flags.append("--moe-grouped-gemm")
    if model.expert_groups:
        flags += [f"{flag} {getattr(model, field)}" for flag, field in EXPERT_GROUPS.items()]
    flags += router_flags(model)
    if model.shared_experts:
        flags.append(f"{SHARED_WIDTH} {model.shared_experts * model.moe_ffn_hidden}")
        flags += [SHARED_GATE] if model.shared_gate else []
    if model.dense_layers:
        flags.append(f"{LAYER_KINDS} '([0]*{model.dense_layers}+[1]*{model.layers - model.dense_layers})'")
    if model.experts_every > 1:
        between, turns = model.experts_every - 1, model.layers // model.experts_every
        flags.append(f"{LAYER_KINDS} '([0]*{between}+[1]*1)*{turns}'")
    if workload.capacity_factor is not None:
        flags.append(f"{CAPACITY} {workload.capacity_factor:.10g}")
    return flags


def router_flags(model: Model) -> list[str]:
    """How tokens' weights are made of scores, beside a softmax over the chosen (moe_utils.py, at core_v0.15.0).

    A sigmoid's weights are always divided by their sum, those of a softmax over all experts never.
    """
    router = model.router
    flags = [] if router.scores == "softmax" else [f"{SCORES} {router.scores}"]
    if router.scores == "softmax" and not router.normalised:
        flags.append(SOFTMAX_OVER_ALL)
    if router.scale != 1.0:
        flags.append(f"{SCORE_SCALE} {router.scale:.10g}")
    return flags + ([EXPERT_BIAS] if router.bias else [])


def latent_flags(model: Model) -> list[str]:
    """Ranks and widths of latent attention; --qk-layernorm are then the norms between its ways down and up."""
    latent = model.latent_attention
    if latent is None:
        return []
    sizes = [f"{flag} {getattr(latent, field)}" for flag, field in LATENT_SIZES.items() if getattr(latent, field)]
    return [LATENT, *sizes, "--qk-layernorm", f"--rope-type {YARN if model.rotary_stretch == YARN else 'rope'}"]


def further_degrees(layout: Layout, model: Model, version: str) -> list[str]:
    """Context parallelism, groups of the distributed optimizer, and how experts are laid out."""
    flags = []
    if layout.cp > 1:
        flags += [f"--context-parallel-size {layout.cp}", f"--cp-comm-type {CONTEXT_KINDS[layout.cp_kind]}"]
    if layout.zero_stage > 0 and layout.size("replicate") > 1:
        flags.append(f"--num-distributed-optimizer-instances {layout.size('replicate')}")
    if not model.experts:
        return flags
    kind, backend = DISPATCHERS[layout.dispatcher]
    flags += [
        f"--expert-model-parallel-size {layout.ep}",
        f"--expert-tensor-parallel-size {layout.size('etp')}",
        f"{DISPATCHER_TYPE} {kind}",
    ]
    if backend:
        flags.append(OLD_FLEX if version in DEEPEP_ALONE else f"{FLEX_BACKEND} {backend}")
    return flags + list(OVERLAPS[layout.ep_overlap])
