"""Megatron-LM's words for shapes, CUDA graphs and what replicas share out, which exports write and imports read back.

From megatron/training/arguments.py and, where core 0.16 and later make options of a dataclass's fields,
megatron/core/transformer/transformer_config.py, at core_v0.19.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.layout.layout import Layout
from trimaran.nouns.attention import RotaryScaling
from trimaran.nouns.model import Model
from trimaran.nouns.stack import Fp8Scaling, GraphedModule, Stack
from trimaran.planner.export.megatron_yarn import YARN

# Sizes that every Megatron is told, and those that it is told where they are not as usual, by the model's fields.
SIZES: Mapping[str, str] = {
    "--num-layers": "layers",
    "--hidden-size": "hidden",
    "--ffn-hidden-size": "ffn_hidden",
    "--num-attention-heads": "heads",
    "--max-position-embeddings": "max_positions",
}
FURTHER_SIZES: Mapping[str, str] = {
    "--kv-channels": "head_dim",
    "--norm-epsilon": "norm_epsilon",
    "--rotary-percent": "rotary_share",
    "--mtp-num-layers": "mtp_depth",
}
GROUPS = "--num-query-groups"
ROTARY_BASE = "--rotary-base"
POSITIONS: Mapping[str, str] = {"learned": "learned_absolute", "rotary": "rope"}
# Megatron-DeepSpeed's words.
OLD_POSITIONS: Mapping[str, str] = {"learned": "absolute", "rotary": "rotary", "alibi": "alibi"}
# What a script begins with that was written for a version, which follows.
WRITTEN_FOR = "# Megatron-LM, core"
TOKENIZER, NULL_TOKENIZER = "--tokenizer-type", "NullTokenizer"
# Versions whose NullTokenizer adds a token of its own to --vocab-size (megatron/core/tokenizers/text/libraries/
# null_tokenizer.py, vocab_size, at core_v0.15.0 to core_v0.17.0 and at core_v0.18.0).
NULL_TOKENIZER_ADDS_ONE = ("0.17", "0.16", "0.15")
NORMS: Mapping[str, str] = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
# What a switch makes of a model, by its fields.
SWITCHES: Mapping[str, tuple[str, object]] = {
    "--swiglu": ("mlp", "swiglu"),
    "--squared-relu": ("mlp", "relu2"),  # megatron/training/arguments.py, at core_v0.15.0 too
    "--qk-layernorm": ("qk_norm", "head"),
    "--add-qkv-bias": ("attention_bias", "qkv"),
    "--disable-bias-linear": ("bias", False),
    "--untie-embeddings-and-output-weights": ("tied_embedding", False),
}
# Which fuses a bias into GELU, SwiGLU and quick GEGLU alone (transformer_config.py, __post_init__).
NO_FUSED_BIAS = "--no-bias-gelu-fusion"
TOLD_MLPS = tuple(value for field, value in SWITCHES.values() if field == "mlp")
# What gpt-oss has in the place of --swiglu, and by which value it stays (examples/gptoss/02_train.sh, lines 148 to 152,
# at 2026-08-22; core_v0.15.0 has the same options).
QUICK_GATE, GATE_OFFSET, GATE_LIMIT = "--quick-geglu", "--glu-linear-offset", "--activation-func-clamp-value"
# Rates of dropout, each 0.1 where it is not stated (transformer_config.py, hidden_dropout and attention_dropout).
DROPOUTS = ("--attention-dropout", "--hidden-dropout")
USUAL_DROPOUT = 0.1
# Traits that the flags above and those of windows and sinks say.
TOLD_TRAITS = (
    "attention_bias", "qk_norm", "rotary_share", "sliding_window", "full_attention_every", "attention_sinks",
    "swiglu_limit", "rotary_stretch", "rotary_yarn",
)  # fmt: skip
FP8_RECIPES: Mapping[Fp8Scaling, str] = {"current": "tensorwise", "delayed": "delayed", "blockwise": "blockwise"}
# The optimizer's states and its steps on the host, gradients and weights on their way meanwhile, which asks for the
# optimizer whose precisions can be chosen (megatron/training/arguments.py, validate_args); and of how many layers
# activations go there, which core 0.15 has no option for.
CHOSEN_PRECISION = "--use-precision-aware-optimizer"
OFFLOADED_OPTIMIZER = ("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", CHOSEN_PRECISION)
OFFLOADED_LAYERS = "--cpu-offloading-num-layers"
WITHOUT_OFFLOADED_LAYERS = ("0.15",)


def rope_scaling(factor: float) -> RotaryScaling:
    """What --use-rope-scaling does (megatron/core/models/common/embeddings/rotary_pos_embedding.py, line 92)."""
    return RotaryScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def shape_flags(model: Model) -> list[str]:
    """Layers, widths, heads and positions, in flags that all Megatrons share."""
    return [f"{flag} {getattr(model, field)}" for flag, field in SIZES.items()]


def kind_flags(model: Model) -> list[str]:
    """What a model is beside its sizes: positions, groups of queries, norms, gates, biases, windows."""
    # latent attention states its widths by itself
    head_dim = model.head_dim if model.latent_attention else model.hidden // model.heads
    usual = {"head_dim": head_dim, "norm_epsilon": 1e-5, "rotary_share": 1.0, "mtp_depth": 0}
    stretched = model.rotary_stretch == YARN and model.latent_attention is None
    positions = YARN if stretched else POSITIONS[model.positions]
    flags = [f"--position-embedding-type {positions}", f"--normalization {NORMS[model.norm]}"]
    if model.kv_heads != model.heads:
        flags += ["--group-query-attention", f"{GROUPS} {model.kv_heads}"]
    for flag, field in FURTHER_SIZES.items():
        if getattr(model, field) != usual[field]:
            flags.append(f"{flag} {getattr(model, field):.10g}")
    if model.positions == "rotary":
        flags.append(f"{ROTARY_BASE} {model.rotary_theta:.0f}")
    if model.rotary_scaling is not None:
        flags += ["--use-rope-scaling", f"--rope-scaling-factor {model.rotary_scaling.factor:g}"]
    switches = [flag for flag, (field, value) in SWITCHES.items() if getattr(model, field) == value]
    if model.swiglu_limit:
        limited = [QUICK_GATE, f"{GATE_OFFSET} 1.0", f"{GATE_LIMIT} {model.swiglu_limit:.10g}"]
        switches = [flag for flag in switches if flag != "--swiglu"] + limited
    flags += [*switches, *([NO_FUSED_BIAS] if model.mlp == "relu2" and model.bias else [])]
    if model.sliding_window:
        flags.append(f"--window-size {model.sliding_window - 1},0")
    if model.full_attention_every:
        flags.append(f"--window-attn-skip-freq {model.full_attention_every}")
    if model.attention_sinks:
        flags.append("--softmax-type learnable")
    return [*flags, *(f"{flag} {model.dropout:g}" for flag in DROPOUTS)]


# Modules of a layer as CUDA graphs, which versions up to 0.17 name by the older flag, and 0.15 attention alone.
GRAPHED_BY = "--cuda-graph-impl"
GRAPHED_MODULES, OLD_GRAPHED_MODULES = "--cuda-graph-modules", "--cuda-graph-scope"
_BY_OLD_NAME, _ATTENTION_ALONE = ("0.15", "0.16", "0.17"), "0.15"
# What a layer of each kind is made of, where all of it is captured.
WHOLE: Mapping[str, tuple[GraphedModule, ...]] = {"dense": ("attn", "mlp"), "experts": ("attn", "moe")}
# What may be captured of experts' part where all of it cannot: tokens are counted before they are sent.
_ROUTED: tuple[GraphedModule, ...] = ("moe_router", "moe_preprocess")


def graph_flags(stack: Stack, model: Model, version: str) -> list[str]:
    """By Transformer Engine's graphs: the modules that the stack replays, or nothing more where they are the layer."""
    parts = {part for kind in model.kinds for part in WHOLE[kind]}
    there = {*parts, *_ROUTED} if model.experts else parts
    modules = [module for module in stack.graphed if module in there]
    if parts.issubset(modules):
        return [f"{GRAPHED_BY} transformer_engine"]
    if version == _ATTENTION_ALONE:
        modules = [module for module in modules if module == "attn"]
    if not modules:
        return []
    flag = OLD_GRAPHED_MODULES if version in _BY_OLD_NAME else GRAPHED_MODULES
    return [f"{GRAPHED_BY} transformer_engine", f"{flag} {' '.join(modules)}"]


# --data-parallel-sharding-strategy (megatron/core/distributed/distributed_data_parallel_config.py), by ZeRO stage.
FSDP, SHARDING, DOUBLE_BUFFER = "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "--fsdp-double-buffer"
SHARDED: Mapping[str, int] = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
# The stack that runs under PyTorch's in its place, and how it says so.
TORCH_FSDP2, BY_TORCH = "megatron-core-torch-fsdp2", "--use-torch-fsdp2"
ACCUMULATED_APART = "--no-gradient-accumulation-fusion"
# Whose --outer-dp-sharding-strategy replicates what a part of the replicas shards; core 0.15 has none.
HYBRID_FSDP = ("0.19",)


def sharding_flags(layout: Layout, stack: Stack) -> list[str]:
    """Who shards optimizer states: the distributed optimizer, and of more than them Megatron-FSDP, or PyTorch's."""
    if stack.fsdp == "torch":
        return [BY_TORCH, ACCUMULATED_APART, "--ckpt-format torch_dist"] if layout.zero_stage > 1 else []
    distributed = ["--use-distributed-optimizer"] if layout.zero_stage > 0 else []
    if layout.zero_stage < 2:
        return distributed
    strategy = next(word for word, stage in SHARDED.items() if stage == layout.zero_stage)
    apart = [ACCUMULATED_APART] if stack.fused_accumulation == "never" else []
    return [FSDP, f"{SHARDING} {strategy}", *distributed, *apart, "--ckpt-format fsdp_dtensor"]
