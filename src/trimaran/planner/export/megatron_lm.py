"""Flags of Megatron-LM (megatron/training/arguments.py, core 0.12)."""

from __future__ import annotations

from trimaran.layout.layout import Layout, resolve_split
from trimaran.nouns.recompute import modules_of
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.export.refuse import refuse_first

_POSITIONS = {"learned": "learned_absolute", "rotary": "rope"}


def megatron_lm(layout: Layout, workload: Workload, stack: Stack) -> str:
    """One flag a line, ready to be continued with data, tokenizer and learning-rate flags."""
    split = resolve_split(layout, workload, stack)
    _refuse(layout, workload, split)
    flags = [*model_flags(workload), *_model_kind(workload), *parallel_flags(layout)]
    if layout.vpp > 1:
        flags.append(f"--num-layers-per-virtual-pipeline-stage {split[0]}")
    elif len(set(split)) > 1:
        flags += [
            f"--decoder-first-pipeline-num-layers {split[0]}",
            f"--decoder-last-pipeline-num-layers {split[-1]}",
        ]
    if layout.sequence_parallel:
        flags.append("--sequence-parallel")
    if layout.zero_stage == 1:
        flags.append("--use-distributed-optimizer")
    if layout.placement == ("tp", "pp", "dp"):
        flags.append("--use-tp-pp-dp-mapping")
    if layout.recompute == "full":
        flags += [
            "--recompute-granularity full",
            "--recompute-method uniform",
            "--recompute-num-layers 1",
        ]
    elif layout.recompute == "selective":
        flags.append("--recompute-granularity selective")
    elif modules := modules_of(layout.recompute):
        flags += ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"]
    return joined([*flags, *batch_flags(layout, workload)])


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
    precision = {"fp16": ["--fp16"], "bf16": ["--bf16"], "fp32": []}[layout.precision]
    return [
        f"--micro-batch-size {layout.mbs}",
        f"--global-batch-size {workload.global_batch}",
        *([f"--rampup-batch-size {ramp.start} {ramp.increment} {ramp.samples}"] if ramp else []),
        f"--optimizer {workload.optimizer}",
        *precision,
    ]


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
    if model.rotary_scaling is not None:
        flags += ["--use-rope-scaling", f"--rope-scaling-factor {model.rotary_scaling.factor:g}"]
    if model.mlp == "swiglu":
        flags.append("--swiglu")
    if not model.bias:
        flags.append("--disable-bias-linear")
    if not model.tied_embedding:
        flags.append("--untie-embeddings-and-output-weights")
    return flags


def _refuse(layout: Layout, workload: Workload, split: tuple[int, ...]) -> None:
    model = workload.model
    middle = split[1:-1]
    refuse_first(
        "Megatron-LM",
        layout,
        (
            (layout.schedule in ("gpipe", "zero_bubble"), f"the {layout.schedule} schedule"),
            (layout.zero_stage > 1, f"ZeRO stage {layout.zero_stage}"),
            (layout.dp_kind != "all_reduce", f"data-parallel kind {layout.dp_kind}"),
            (layout.recompute_every > 1, f"recomputing every {layout.recompute_every}th layer alone"),
            (layout.precision == "bf16_pure", "precision bf16_pure"),
            (layout.vpp > 1 and len(set(split)) > 1, "uneven virtual stages"),
            (len(set(middle)) > 1, "middle stages of different length"),
            (layout.placement not in (("tp", "dp", "pp"), ("tp", "pp", "dp")), f"placement {layout.placement}"),
            (model.positions == "alibi", "ALiBi positions"),
            (model.embedding_norm, "a norm after the embedding"),
            (model.head == "classifier", "a classifier head"),
        ),
    )
