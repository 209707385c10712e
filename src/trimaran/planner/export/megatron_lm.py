"""Flags of Megatron-LM (megatron/training/arguments.py, core 0.15 to 0.19)."""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.layout.axes import USUAL_PLACEMENT, full_placement
from trimaran.layout.layout import Layout, resolve_split
from trimaran.nouns.model import Model
from trimaran.nouns.precision import PRECISIONS, PrecisionName
from trimaran.nouns.recompute import modules_of
from trimaran.nouns.stack import DataParallelKind, Offload, Schedule, Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.export.asked import Asked
from trimaran.planner.export.megatron_mixtures import (
    CONTEXT_KINDS,
    DEEPEP_ALONE,
    DISPATCHERS,
    EXPERTS_IN_BF16,
    MIXTURE_TRAITS,
    OVERLAPS,
    SHARED_BESIDE_ALLTOALL,
    WITHOUT_SHARED_GATE,
    further_degrees,
    latent_flags,
    mixture_flags,
)
from trimaran.planner.export.megatron_words import (
    FP8_RECIPES,
    HYBRID_FSDP,
    NULL_TOKENIZER,
    NULL_TOKENIZER_ADDS_ONE,
    OFFLOADED_LAYERS,
    OFFLOADED_OPTIMIZER,
    POSITIONS,
    TOKENIZER,
    TOLD_MLPS,
    TOLD_TRAITS,
    WITHOUT_OFFLOADED_LAYERS,
    WRITTEN_FOR,
    graph_flags,
    kind_flags,
    rope_scaling,
    shape_flags,
    sharding_flags,
)
from trimaran.planner.export.megatron_yarn import WITHOUT_YARN, YARN, untold_yarn, yarn_flags
from trimaran.planner.export.refuse import refuse_first, untold_traits

# --use-tp-pp-dp-mapping
_STAGES_INSIDE = full_placement(("tp", "pp", "dp"))

VERSIONS = ("0.19", "0.18", "0.17", "0.16", "0.15")
# What it has: whatever else a layout chooses is refused.
SCHEDULES: tuple[Schedule, ...] = ("none", "1f1b", "interleaved")
_KINDS: tuple[DataParallelKind, ...] = ("all_reduce", "fully_sharded")
_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "activations")
_WIDE: Mapping[PrecisionName, list[str]] = {"fp16": ["--fp16"], "bf16": ["--bf16"], "fp32": []}
# The format of the layers' linear products, in flags of core 0.15; a stack says how fp8 is scaled.
_NARROW: Mapping[PrecisionName, list[str]] = {
    "fp8": ["--fp8-format hybrid"],
    "mxfp8": ["--fp8-format e4m3", "--fp8-recipe mxfp8"],
    "nvfp4": ["--fp4-format e2m1", "--fp4-recipe nvfp4"],
}

# Dispatchers that are a fused kernel's.
_FUSED = tuple(name for name, (_, backend) in DISPATCHERS.items() if backend)


def megatron_lm(asked: Asked) -> str:
    """A comment and one flag a line, ready to be continued with flags of data, tokenizer and learning rate."""
    layout, workload, stack, version = asked.layout, asked.workload, asked.stack, asked.version
    split, model = resolve_split(layout, workload, stack), stack.trained(workload.model)
    _refuse(layout, workload, stack, version)
    flags = [
        *model_flags(workload),
        *kind_flags(model),
        *latent_flags(model),
        *yarn_flags(model),
        *mixture_flags(workload),
        *_vocabulary_flags(workload, version),
        *parallel_flags(layout),
        *further_degrees(layout, model, version),
        *_stage_flags(layout, split, model.mtp_depth),
    ]
    if layout.sequence_parallel:
        flags.append("--sequence-parallel")
    flags += sharding_flags(layout, stack)
    if layout.placement == _STAGES_INSIDE:
        flags.append("--use-tp-pp-dp-mapping")
    flags += [*_recompute_flags(layout, stack, split), *_overlap_flags(layout, stack), *_offload_flags(layout, split)]
    if stack.fp32_loss and stack.loss_copies == 1:
        flags.append("--cross-entropy-loss-fusion")
    flags += [*batch_flags(layout, workload), *_narrow_flags(layout, stack), *_gradient_flags(layout, stack)]
    flags += graph_flags(stack, model, version)
    head = [f"{WRITTEN_FOR} {version}: {layout} on {layout.devices} devices", *untold_yarn(model)]
    if layout.zero_stage > 1:
        head.append("# FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS=1: leave it unset.")
    if model.experts:
        head.append("# How the router's load is balanced is not planned: state --moe-router-load-balancing-type.")
    return "\n".join([*head, joined(flags)])


def _vocabulary_flags(workload: Workload, version: str) -> list[str]:
    """The vocabulary's size without text: a tokenizer for data that is token numbers already, or for --mock-data."""
    size = workload.model.vocab - int(version in NULL_TOKENIZER_ADDS_ONE)
    return [f"{TOKENIZER} {NULL_TOKENIZER}", f"--vocab-size {size}"]


def _stage_flags(layout: Layout, split: tuple[int, ...], mtp_depth: int) -> list[str]:
    """The stage split: nothing where it is even, first and last stage where only these differ, else every stage."""
    if len(set(split)) == 1:
        return [f"--num-layers-per-virtual-pipeline-stage {split[0]}"] if layout.vpp > 1 else []
    if layout.vpp == 1 and len(set(split[1:-1])) <= 1 and min(split) > 0:
        return [f"--decoder-first-pipeline-num-layers {split[0]}", f"--decoder-last-pipeline-num-layers {split[-1]}"]
    stages = "|".join("t" * layers for layers in split)
    return [f"--pipeline-model-parallel-layout 'E{stages}{'m' * mtp_depth}L'"]


def _recompute_flags(layout: Layout, stack: Stack, split: tuple[int, ...]) -> list[str]:
    """What is made again: modules by name where the stack knows them, a share of each stage's layers, or all."""
    if layout.recompute == "full":
        method, layers = "uniform", 1
        if layout.recompute_every > 1:
            method, layers = "block", -(-max(split) // layout.recompute_every)
        return [
            "--recompute-granularity full",
            f"--recompute-method {method}",
            f"--recompute-num-layers {layers}",
        ]
    if layout.recompute == "selective":
        modules = [module.name for module in stack.recompute_modules if module.operators == stack.selective]
        return ["--recompute-granularity selective", *(f"--recompute-modules {name}" for name in modules)]
    if modules := list(modules_of(layout.recompute)):
        return ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"]
    return []


def _offload_flags(layout: Layout, split: tuple[int, ...]) -> list[str]:
    """What lies in the host's memory; the last layer's activations are wanted at once and stay."""
    if layout.offload == "optimizer":
        return list(OFFLOADED_OPTIMIZER)
    if layout.offload == "activations":
        return [f"{OFFLOADED_LAYERS} {sum(split) - 1}"]
    return []


def _gradient_flags(layout: Layout, stack: Stack) -> list[str]:
    """Gradients in bf16, where the stack that was planned for is a Megatron that keeps them so; else they are fp32."""
    narrow = stack.framework == "megatron" and stack.grad_bytes_16bit == 2
    return ["--grad-reduce-in-bf16"] if narrow and PRECISIONS[layout.precision].wide == "bf16" else []


def _overlap_flags(layout: Layout, stack: Stack) -> list[str]:
    """What runs beside products, as far as the stack that was planned for counts it; it is off unless asked for."""
    # later stages of a pipeline without virtual ones would wait for theirs one after the other
    ahead = layout.pp == 1 or layout.vpp > 1
    gathers = layout.zero_stage > 0 and stack.gathers_behind_forward and ahead
    # ranks that share a sequence sum gradients as replicas do
    sums = layout.dp * layout.cp > 1 and stack.overlap_dp > 0 and layout.zero_stage in stack.overlapped_zero_stages
    # PyTorch's FSDP overlaps by itself, and Megatron-LM refuses its own switches beside it
    by_itself = stack.fsdp == "torch" and layout.zero_stage > 1
    switches = (
        ((sums or gathers) and not by_itself, "--overlap-grad-reduce"),
        (gathers and not by_itself, "--overlap-param-gather"),
        (layout.sequence_parallel and stack.sums_behind_products, "--tp-comm-overlap"),
    )
    return [flag for said, flag in switches if said]


def model_flags(workload: Workload) -> list[str]:
    """The shape and the length of sequences, in flags that all Megatrons share."""
    # validate_args refuses fewer positions than tokens, also where angles stand for them and need no number
    positions = max(workload.model.max_positions, workload.seq_len)
    model = workload.model.model_copy(update={"max_positions": positions})
    return [*shape_flags(model), f"--seq-length {workload.seq_len}", "--make-vocab-size-divisible-by 128"]


def parallel_flags(layout: Layout) -> list[str]:
    """TP and PP; DP is what is left of the world size."""
    return [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
    ]


def batch_flags(layout: Layout, workload: Workload) -> list[str]:
    """Micro-batch, global batch and its ramp-up, optimizer and precision."""
    ramp = workload.ramp_up
    precision = _WIDE[PRECISIONS[layout.precision].wide]
    return [
        f"--micro-batch-size {layout.mbs}",
        f"--global-batch-size {workload.global_batch}",
        *([f"--rampup-batch-size {ramp.start} {ramp.increment} {ramp.samples}"] if ramp else []),
        f"--optimizer {workload.optimizer}",
        *precision,
    ]


def _narrow_flags(layout: Layout, stack: Stack) -> list[str]:
    """The format of the layers' linear products, how it is scaled, and whether weights are gathered in it."""
    narrow = PRECISIONS[layout.precision].narrow
    if narrow is None:
        return []
    flags = list(_NARROW[layout.precision])
    if layout.precision == "fp8":
        flags.append(f"--fp8-recipe {FP8_RECIPES[stack.fp8_scaling]}")
    # validate_args asks for the distributed optimizer beside it, and for delayed scales where that steps on the host;
    # what no rank shares out is gathered by none
    delayed = layout.precision == "fp8" and stack.fp8_scaling == "delayed"
    may_gather = layout.zero_stage > 0 and (delayed or layout.offload != "optimizer")
    gathers = stack.gathers_casts and narrow.gathers and may_gather
    return [*flags, *(["--fp8-param-gather"] if gathers else [])]


def joined(flags: list[str]) -> str:
    """Flags as lines of a shell command."""
    return " \\\n".join(flags)


def _checked_config(layout: Layout, model: Model, stack: Stack) -> tuple[tuple[bool, str], ...]:
    """What its own configuration stops at, as what refuse_first takes.

    Of core 0.16.1: megatron/core/transformer/transformer_config.py, __post_init__; moe/shared_experts.py, line 47;
    moe/token_dispatcher.py, line 1346.
    """
    router, alone = model.router, layout.ep * layout.size("etp") == 1
    again, over_softmax = modules_of(layout.recompute), model.experts > 0 and router.scores == "softmax"
    return (
        (bool(stack.graphed) and layout.recompute == "full", "CUDA graphs of layers that are all made again"),
        (bool(stack.graphed) and layout.offload == "activations", "CUDA graphs beside offload activations"),
        ("moe_router" in stack.graphed and "moe" in again, "CUDA graphs of a router that is made again"),
        (
            over_softmax and router.normalised and model.top_k == 1,
            "a softmax over one chosen expert (router.normalised)",
        ),
        (over_softmax and router.bias, "a bias of experts beside softmax scores"),
        (model.shared_experts > 0 and model.bias, "biases of shared experts"),
        (
            model.experts > 0 and alone and layout.dispatcher in _FUSED,
            f"dispatcher {layout.dispatcher} of EP 1 x ETP 1",
        ),
    )


def _refuse(layout: Layout, workload: Workload, stack: Stack, version: str) -> None:
    model, every, scaling = workload.model, layout.recompute_every, workload.model.rotary_scaling
    refuse_first(
        "Megatron-LM",
        layout,
        (
            (
                layout.size("replicate") > 1 and layout.zero_stage > 1 and version not in HYBRID_FSDP,
                f"shard {layout.shard} under FSDP in core {version}",
            ),
            (
                model.experts > 0 and layout.dispatcher == "hybridep" and version in DEEPEP_ALONE,
                f"dispatcher hybridep in core {version}",
            ),
            (
                layout.ep_overlap == "shared" and layout.dispatcher != "alltoall" and version in SHARED_BESIDE_ALLTOALL,
                f"ep_overlap shared beside dispatcher {layout.dispatcher} in core {version}",
            ),
            (
                model.experts > 0 and PRECISIONS[layout.precision].wide != "bf16" and version in EXPERTS_IN_BF16,
                f"precision {layout.precision} of experts in core {version}",
            ),
            (
                # megatron/core/optimizer/distrib_optimizer.py, __init__
                workload.optimizer != "adam" and layout.zero_stage > 0 and stack.fsdp != "torch",
                f"optimizer {workload.optimizer} in ZeRO stage {layout.zero_stage}",
            ),
            *_checked_config(layout, model, stack),
            (
                model.rotary_stretch not in ("none", YARN)
                or (model.rotary_stretch == YARN and not model.latent_attention and version in WITHOUT_YARN),
                f"model.rotary_stretch {model.rotary_stretch} in core {version}",
            ),
            (model.shared_gate and version in WITHOUT_SHARED_GATE, f"model.shared_gate in core {version}"),
            (layout.schedule not in SCHEDULES, f"the {layout.schedule} schedule"),
            (
                layout.zero_stage > 1 and stack.fsdp == "torch" and model.tied_embedding,
                f"ZeRO stage {layout.zero_stage} of a head that shares the embedding's weights",
            ),
            (layout.zero_stage > 1 and layout.pp > 1, f"ZeRO stage {layout.zero_stage} of a pipeline"),
            (layout.dp_kind not in _KINDS, f"data-parallel kind {layout.dp_kind}"),
            (layout.cp > 1 and layout.cp_kind not in CONTEXT_KINDS, f"CP by {layout.cp_kind}"),
            (model.experts > 0 and layout.dispatcher not in DISPATCHERS, f"dispatcher {layout.dispatcher}"),
            (layout.ep_overlap not in OVERLAPS, f"ep_overlap {layout.ep_overlap}"),
            (every > 1 and not stack.recomputes_by_stage, f"recomputing one layer in {every}"),
            (
                layout.recompute == "selective" and bool(stack.selective_keeps),
                f"selective recompute that keeps {', '.join(stack.selective_keeps)}",
            ),
            (layout.offload not in _OFFLOADS, f"offload {layout.offload}"),
            (
                layout.offload == "activations" and version in WITHOUT_OFFLOADED_LAYERS,
                f"offload activations in core {version}",
            ),
            (layout.precision not in (*_WIDE, *_NARROW), f"precision {layout.precision}"),
            (layout.placement not in (USUAL_PLACEMENT, _STAGES_INSIDE), f"placement {layout.placement}"),
            *untold_traits(model, *TOLD_TRAITS, *MIXTURE_TRAITS, "mlp"),
            (model.mlp not in ("gelu", *TOLD_MLPS), f"model.mlp {model.mlp}"),
            (model.qk_norm == "all_heads", "norms of all heads' queries and keys as one"),
            (
                model.attention_bias not in (None, "qkv") or (model.attention_bias == "qkv" and model.bias),
                f"attention_bias {model.attention_bias} beside bias {model.bias}",
            ),
            (
                scaling is not None and scaling != rope_scaling(scaling.factor),
                "rotary scaling but with low_freq_factor 1, high_freq_factor 4 and original_max_positions 8192",
            ),
            (model.rotary_theta % 1 > 0, f"a rotary base that is no whole number, {model.rotary_theta}"),
            (model.positions not in POSITIONS, f"model.positions {model.positions}"),
            (model.embedding_norm, "a norm after the embedding"),
            (model.head != "vocabulary", f"a {model.head} head"),
        ),
    )
