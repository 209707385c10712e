"""Flags of Megatron-LM (megatron/training/arguments.py, core 0.15)."""

from __future__ import annotations

from trimaran.layout.layout import Layout, resolve_split
from trimaran.nouns.precision import PRECISIONS
from trimaran.nouns.recompute import modules_of
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.export.refuse import refuse_first, untold_traits

_POSITIONS = {"learned": "learned_absolute", "rotary": "rope"}
_WIDE = {"fp16": ["--fp16"], "bf16": ["--bf16"], "fp32": list[str]()}
_FP8_RECIPES = {"current": "tensorwise", "delayed": "delayed", "blockwise": "blockwise"}


def megatron_lm(layout: Layout, workload: Workload, stack: Stack) -> str:
    """One flag a line, ready to be continued with data, tokenizer and learning-rate flags."""
    split = resolve_split(layout, workload, stack)
    _refuse(layout, workload, stack)
    flags = [*model_flags(workload), *_model_kind(workload), *parallel_flags(layout), *_stage_flags(layout, split)]
    if layout.sequence_parallel:
        flags.append("--sequence-parallel")
    if layout.zero_stage == 1:
        flags.append("--use-distributed-optimizer")
    if layout.placement == ("tp", "pp", "dp"):
        flags.append("--use-tp-pp-dp-mapping")
    flags += [*_recompute_flags(layout, stack, split), *_stack_flags(layout, stack)]
    return joined([*flags, *batch_flags(layout, workload), *_narrow_flags(layout, stack)])


def _stage_flags(layout: Layout, split: tuple[int, ...]) -> list[str]:
    """The stage split: nothing where it is even, first and last stage where only these differ, else every stage."""
    if len(set(split)) == 1:
        return [f"--num-layers-per-virtual-pipeline-stage {split[0]}"] if layout.vpp > 1 else []
    if layout.vpp == 1 and len(set(split[1:-1])) <= 1:
        return [f"--decoder-first-pipeline-num-layers {split[0]}", f"--decoder-last-pipeline-num-layers {split[-1]}"]
    stages = "|".join("t" * layers for layers in split)
    return [f"--pipeline-model-parallel-layout 'E{stages}L'"]


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


def _stack_flags(layout: Layout, stack: Stack) -> list[str]:
    """Switches by which Megatron-LM does what the stack's facts say, and is off otherwise."""
    sharded = layout.zero_stage == 1 and stack.gathers_behind_forward
    switches = (
        (sharded, "--overlap-grad-reduce"),
        (sharded, "--overlap-param-gather"),
        (layout.sequence_parallel and stack.sums_behind_products, "--tp-comm-overlap"),
        (stack.fp32_loss and stack.loss_copies == 1, "--cross-entropy-loss-fusion"),
        (not stack.dropout, "--attention-dropout 0"),
        (not stack.dropout, "--hidden-dropout 0"),
    )
    return [flag for said, flag in switches if said]


def model_flags(workload: Workload) -> list[str]:
    """The shape, in flags that all Megatrons share."""
    model = workload.model
    return [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn_hidden}",
        f"--num-attention-heads {model.heads}",
        f"--seq-length {workload.seq_len}",
        f"--max-position-embeddings {model.max_positions}",
        "--make-vocab-size-divisible-by 128",
    ]


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
    """The format of the layers' linear products and how it is scaled, in flags of core 0.15."""
    narrow = PRECISIONS[layout.precision].narrow
    if narrow is None:
        return []
    flags = {
        "fp8": ["--fp8-format hybrid", f"--fp8-recipe {_FP8_RECIPES[stack.fp8_scaling]}"],
        "mxfp8": ["--fp8-format e4m3", "--fp8-recipe mxfp8"],
    }.get(layout.precision, ["--fp4-format e2m1", "--fp4-recipe nvfp4"])
    return [*flags, *(["--fp8-param-gather"] if stack.gathers_casts and narrow.gathers else [])]


def joined(flags: list[str]) -> str:
    """Flags as lines of a shell command."""
    return " \\\n".join(flags)


def _model_kind(workload: Workload) -> list[str]:
    model = workload.model
    flags = [f"--position-embedding-type {_POSITIONS[model.positions]}"]
    if model.kv_heads != model.heads:
        flags += ["--group-query-attention", f"--num-query-groups {model.kv_heads}"]
    if model.head_dim != model.hidden // model.heads:
        flags.append(f"--kv-channels {model.head_dim}")
    if model.norm == "rmsnorm":
        flags.append("--normalization RMSNorm")
    if model.norm_epsilon != 1e-5:
        flags.append(f"--norm-epsilon {model.norm_epsilon:g}")
    if model.positions == "rotary":
        flags.append(f"--rotary-base {model.rotary_theta:.0f}")
    if model.rotary_share != 1.0:
        flags.append(f"--rotary-percent {model.rotary_share:g}")
    if model.qk_norm == "head":
        flags.append("--qk-layernorm")
    if model.attention_bias == "qkv":
        flags.append("--add-qkv-bias")
    if model.rotary_scaling is not None:
        flags += ["--use-rope-scaling", f"--rope-scaling-factor {model.rotary_scaling.factor:g}"]
    if model.mlp == "swiglu":
        flags.append("--swiglu")
    if not model.bias:
        flags.append("--disable-bias-linear")
    if not model.tied_embedding:
        flags.append("--untie-embeddings-and-output-weights")
    return flags


def _refuse(layout: Layout, workload: Workload, stack: Stack) -> None:
    model, every = workload.model, layout.recompute_every
    refuse_first(
        "Megatron-LM",
        layout,
        (
            (layout.schedule in ("gpipe", "zero_bubble"), f"the {layout.schedule} schedule"),
            (layout.zero_stage > 1, f"ZeRO stage {layout.zero_stage}"),
            (layout.dp_kind != "all_reduce", f"data-parallel kind {layout.dp_kind}"),
            (every > 1 and not stack.recomputes_by_stage, f"recomputing every {every}th layer alone"),
            (layout.precision == "bf16_pure", "precision bf16_pure"),
            (layout.placement not in (("tp", "dp", "pp"), ("tp", "pp", "dp")), f"placement {layout.placement}"),
            *untold_traits(model, "attention_bias", "qk_norm", "rotary_share"),
            (model.qk_norm == "all_heads", "norms of all heads' queries and keys as one"),
            (
                model.attention_bias not in (None, "qkv"),
                f"attention_bias {model.attention_bias} beside bias {model.bias}",
            ),
            (model.positions == "alibi", "ALiBi positions"),
            (model.embedding_norm, "a norm after the embedding"),
            (model.head == "classifier", "a classifier head"),
        ),
    )
