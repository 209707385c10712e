"""Megatron-LM's arguments (megatron/training/arguments.py, core 0.15 to 0.19) as a layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.recompute import recompute_word
from trimaran.nouns.text import quoted
from trimaran.planner.configs.flags import Flags, whole
from trimaran.planner.configs.megatron.beside import is_beside
from trimaran.planner.configs.megatron.by_deepspeed import DEEPSPEED_GROUPS, by_deepspeed
from trimaran.planner.configs.megatron.graphs import graphs
from trimaran.planner.configs.megatron.mixtures import further_degrees, mixture
from trimaran.planner.configs.megatron.sharding import sharded
from trimaran.planner.configs.megatron.states import states
from trimaran.planner.configs.megatron.vocabulary import vocabulary
from trimaran.planner.configs.megatron.yarn import yarn
from trimaran.planner.configs.stated import Stated, optimizer_of
from trimaran.planner.export.megatron_mixtures import LATENT
from trimaran.planner.export.megatron_words import (
    ACCUMULATED_APART,
    DROPOUTS,
    FP8_RECIPES,
    FURTHER_SIZES,
    GATE_LIMIT,
    GATE_OFFSET,
    GROUPS,
    NORMS,
    NULL_TOKENIZER,
    NULL_TOKENIZER_ADDS_ONE,
    OFFLOADED_LAYERS,
    OFFLOADED_OPTIMIZER,
    OLD_POSITIONS,
    POSITIONS,
    QUICK_GATE,
    ROTARY_BASE,
    SIZES,
    SWITCHES,
    TOKENIZER,
    USUAL_DROPOUT,
    rope_scaling,
)
from trimaran.planner.export.megatron_yarn import YARN

# Flags by which a command is known to train: those that say how, and how large the model is.
TELLING: Mapping[str, object] = {
    **SIZES, **FURTHER_SIZES, **SWITCHES, "--tensor-model-parallel-size": "tp", "--pipeline-model-parallel-size": "pp",
    "--micro-batch-size": "mbs", "--global-batch-size": "gbs", "--seq-length": "seq",
}  # fmt: skip
# What changes time or memory and what the cost model has no word for, where it is stated.
_UNCOUNTED = (
    "--apply-layernorm-1p", "--attention-backend", "--cpu-offloading", "--fine-grained-activation-offloading",
    "--overlap-param-gather-with-optimizer-step", "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion", "--no-bias-gelu-fusion", "--no-rope-fusion",
    "--fp16-lm-cross-entropy", "--microbatch-group-size-per-virtual-pipeline-stage",
    "--distribute-saved-activations",
    "--no-overlap-p2p-communication", "--step-batch-size-schedule",
    "--use-nccl-ub", "--nccl-ub",
)  # fmt: skip
# What makes another model or another layout than any that can be said.
_UNSAID = (
    "--hybrid-layer-pattern", "--hybrid-override-pattern", "--heterogeneous-layers-config-path",
    "--mtp-use-repeated-layer", "--qk-l2-norm", "--experimental-attention-variant", "--lora-r",
)  # fmt: skip
# What hands the training to DeepSpeed's engine, in Megatron-DeepSpeed alone.
_BY_DEEPSPEED = "--deepspeed"
_MODULE = re.compile(r"\(([^()]{1,4096})\)\*(\d{1,5})|(.)\*(\d{1,5})")
_MOST_LAYERS = 100_000


def megatron(given: Mapping[str, Sequence[str]], written_for: str = "") -> Stated:
    """What arguments state; what they leave out is as Megatron-LM has it. Raises TrimaranError naming a flag.

    `written_for` is the version of its core, where the file says so.
    """
    stated = Stated("megatron-deepspeed" if _BY_DEEPSPEED in given else "megatron-lm")
    flags = Flags(given, stated)
    for flag in _UNSAID:
        if flags.has(flag):
            raise TrimaranError(f"{flag} makes a model or a layout that cannot be said here: no cost is known of it")
    _model(flags, stated, written_for)
    _workload(flags, stated)
    _layout(flags, stated)
    further_degrees(flags, stated)
    if flags.has(_BY_DEEPSPEED):
        by_deepspeed(flags, stated)
    _stages(flags, stated)
    _precision(flags, stated)
    _stack(flags, stated)
    sharded(flags, stated)
    # torchrun's words, and those of DeepSpeed's launcher
    per_node = flags.word("--nproc-per-node") or flags.word("--num-gpus") or ""
    nodes = flags.word("--nnodes") or flags.word("--num-nodes") or ""
    launched = whole(per_node), whole(nodes)
    if launched[0] and launched[1]:
        stated.devices = launched[0] * launched[1]
    _offload(flags, stated)
    states(flags, stated)
    stated.uncounted += [flag for flag in _UNCOUNTED if flags.has(flag)]
    stated.unread = [flag for flag in flags.unread() if not is_beside(flag)]
    return stated


def _offload(flags: Flags, stated: Stated) -> None:
    """What lies in the host's memory, as far as it is all of a kind."""
    flags.has("--delay-wgrad-compute")  # goes with what hides exchanges
    optimizer, layers = (flags.has(OFFLOADED_OPTIMIZER[0]), flags.count(OFFLOADED_LAYERS))
    if optimizer:
        stated.layout["offload"] = "optimizer"
        stated.stack["offload_overlaps"] = flags.has(OFFLOADED_OPTIMIZER[1])
    if layers and not optimizer:
        stated.layout["offload"] = "activations"
    if optimizer and layers:
        stated.uncounted.append(OFFLOADED_LAYERS)
    if (part := flags.number("--optimizer-offload-fraction")) is not None and part < 1.0:
        stated.uncounted.append(f"--optimizer-offload-fraction {part:g}, counted as 1")


def _model(flags: Flags, stated: Stated, written_for: str) -> None:
    model = stated.model
    sizes = {field: flags.count(flag) for flag, field in SIZES.items()}
    sizes |= {"head_dim": flags.count("--kv-channels"), "vocab": flags.count("--padded-vocab-size")}
    numbers = {field: flags.number(flag) for flag, field in FURTHER_SIZES.items() if field != "head_dim"}
    numbers["rotary_theta"] = flags.number(ROTARY_BASE)
    vocab = vocabulary(flags, stated)
    if vocab is not None and written_for in NULL_TOKENIZER_ADDS_ONE and flags.word(TOKENIZER) == NULL_TOKENIZER:
        vocab += 1
    sizes["vocab"] = vocab if sizes["vocab"] is None else sizes["vocab"]
    if flags.has("--group-query-attention"):
        sizes["kv_heads"] = flags.count(GROUPS)
    if (groups := flags.count(DEEPSPEED_GROUPS)) is not None:
        sizes["kv_heads"] = groups
    model |= {name: value for name, value in (sizes | numbers).items() if value is not None}
    if not model:
        return
    spelled = (*POSITIONS.items(), *OLD_POSITIONS.items())
    # mrope has three positions a token, which are equal in text
    words = {word: position for position, word in spelled} | {YARN: "rotary", "mrope": "rotary"}
    position = flags.word("--position-embedding-type", words) or POSITIONS["learned"]
    rotary = flags.has("--use-rotary-position-embeddings")
    model["positions"] = "rotary" if rotary else words[position]
    if position == YARN and LATENT not in flags.given:
        yarn(flags, stated, latent=False)
    norms = {word: norm for norm, word in NORMS.items()}
    lower = {word.lower(): word for word in norms}  # as Megatron-DeepSpeed spells them
    model["norm"] = norms[lower.get(word := flags.word("--normalization", {*norms, *lower}) or "layernorm", word)]
    model |= {field: value for flag, (field, value) in SWITCHES.items() if flags.has(flag)}
    _gate(flags, stated)
    mixture(flags, stated)
    if flags.has("--use-rope-scaling"):
        model["rotary_scaling"] = rope_scaling(flags.number("--rope-scaling-factor") or 8.0).model_dump()
    if window := flags.word("--window-size"):
        before, _, after = window.strip("()").partition(",")
        if (earlier := whole(before)) is None or after.strip() != "0":
            raise TrimaranError(
                f"--window-size is {quoted(window)}: only so many tokens before and 0 after can be said"
            )
        model["sliding_window"] = earlier + 1
        if every := flags.count("--window-attn-skip-freq"):
            model["full_attention_every"] = every
    if flags.word("--softmax-type", ("vanilla", "learnable")) == "learnable":
        model["attention_sinks"] = True
    rates = [USUAL_DROPOUT if (rate := flags.number(flag)) is None else rate for flag in DROPOUTS]
    model["dropout"] = max(rates)
    stated.stack["dropout"] = max(rates) > 0


def _gate(flags: Flags, stated: Stated) -> None:
    """A gated MLP that is not --swiglu's, and the inner width where it is not stated."""
    model = stated.model
    quick, offset, limit = flags.has(QUICK_GATE), flags.number(GATE_OFFSET), flags.number(GATE_LIMIT)
    hidden = model.get("hidden")
    if "ffn_hidden" not in model and isinstance(hidden, int):
        # megatron/training/arguments.py, validate_args: a gated MLP is as large as one of 4 x hidden
        model["ffn_hidden"] = hidden * 8 // 3 // 64 * 64 if model.get("mlp") == "swiglu" else 4 * hidden
    if quick and limit and offset == 1.0:
        model |= {"mlp": "swiglu", "swiglu_limit": limit}
        return
    if quick:
        model["mlp"] = "geglu"
    stated.uncounted += [f"{flag} {value:g}" for flag, value in ((GATE_LIMIT, limit), (GATE_OFFSET, offset)) if value]


def _workload(flags: Flags, stated: Stated) -> None:
    sizes = {"seq_len": flags.count("--seq-length"), "global_batch": flags.count("--global-batch-size")}
    stated.workload |= {name: value for name, value in sizes.items() if value is not None}
    stated.workload["optimizer"] = optimizer_of(flags.word("--optimizer") or "adam", stated)
    ramp = flags.words("--rampup-batch-size")
    if ramp:
        numbers = [number for word in ramp if (number := whole(word)) is not None]
        if len(numbers) != 3 or len(ramp) != 3:
            raise TrimaranError(
                f"--rampup-batch-size is {quoted(' '.join(ramp))}, expected start, increment and samples"
            )
        stated.workload["ramp_up"] = dict(zip(("start", "increment", "samples"), numbers, strict=True))


def _layout(flags: Flags, stated: Stated) -> None:
    layout = stated.layout
    layout["tp"] = flags.degree("--tensor-model-parallel-size")
    layout["pp"] = flags.degree("--pipeline-model-parallel-size")
    if (mbs := flags.count("--micro-batch-size")) is not None:
        layout["mbs"] = mbs
    layout["zero_stage"] = 1 if flags.has("--use-distributed-optimizer") else flags.count("--zero-stage") or 0
    layout["sequence_parallel"] = flags.has("--sequence-parallel")
    if flags.has("--use-tp-pp-dp-mapping"):
        layout["placement"] = ("tp", "pp", "dp")
    granularity = flags.word("--recompute-granularity", ("full", "selective"))
    modules = [part for word in flags.words("--recompute-modules") for part in word.strip("[]").split()]
    if flags.has("--moe-layer-recompute"):  # transformer_config.py, __post_init__: beside the others, or core_attn
        granularity, modules = "selective", [*(modules or ["core_attn"]), *(["moe"] if "moe" not in modules else [])]
    if flags.has("--recompute-activations"):
        granularity = "selective"
    if flags.has("--checkpoint-activations"):
        granularity = "full"
        flags.has("--deepspeed-activation-checkpointing")  # goes with it
    if granularity == "selective":
        try:
            layout["recompute"] = "selective" if modules in ([], ["core_attn"]) else recompute_word("+".join(modules))
        except ValueError as error:
            raise TrimaranError(f"--recompute-modules is {quoted(' '.join(modules))}, {error}") from None
    elif granularity == "full":
        layout["recompute"] = "full"
        method, layers = flags.word("--recompute-method", ("uniform", "block")), flags.count("--recompute-num-layers")
        if method == "block" and layers is not None:
            stated.recomputed_layers = layers
        elif (layers or 1) > 1:
            stated.uncounted.append(f"--recompute-num-layers {layers} at once")


def _stages(flags: Flags, stated: Stated) -> None:
    """The stage split, as far as it can be known without the model's layers."""
    pp = stated.layout["pp"]
    first, last = (flags.count(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    stated.ends = (first, last)
    # DeepSpeed's partition by types of layers counts the embedding at both ends, as BLOOM's training did.
    both = flags.word("--pp-partition-method") == "type:transformer|embedding"
    stated.ends_less = (
        int(flags.has("--account-for-embedding-in-pipeline-split") or both),
        int(flags.has("--account-for-loss-in-pipeline-split") or both),
    )
    stated.chunk = flags.count("--num-layers-per-virtual-pipeline-stage")
    chunks = "--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size"
    if virtual := next((count for flag in chunks if (count := flags.count(flag))), None):
        stated.layout["vpp"] = virtual
    if written := flags.word("--pipeline-model-parallel-layout"):
        split = _written(written)
        assert isinstance(pp, int)
        if pp < 1 or len(split) % pp:
            raise TrimaranError(
                f"--pipeline-model-parallel-layout has {len(split)} stages, not a multiple of "
                f"--pipeline-model-parallel-size {pp}"
            )
        stated.layout |= {"stage_split": split, "vpp": len(split) // pp}


def _written(text: str) -> tuple[int, ...]:
    """Layers of each stage of `Et*3|(tt|)*2mL` (megatron/core/transformer/pipeline_parallel_layer_layout.py).

    Layers that predict further tokens, m, are with the loss L, where they are counted.
    """
    layout = text.replace(",", "").strip("'\"")
    while match := _MODULE.search(layout):
        unit, times = (match[1], int(match[2])) if match[1] is not None else (match[3], int(match[4]))
        if len(layout) + len(unit) * times > _MOST_LAYERS:
            raise TrimaranError(f"--pipeline-model-parallel-layout has more than {_MOST_LAYERS} layers: correct it")
        layout = layout[: match.start()] + unit * times + layout[match.end() :]
    stages = layout.split("|")
    apart = any("m" in stage for stage in stages[:-1])
    if set(layout) - set("EtmL|") or apart or not all("t" in stage for stage in stages[1:-1]):
        raise TrimaranError(
            f"--pipeline-model-parallel-layout is {quoted(text)}: only layers t between E and L, and m before L, can "
            f"be said here"
        )
    return tuple(stage.count("t") for stage in stages)


def _precision(flags: Flags, stated: Stated) -> None:
    wide = "bf16" if flags.has("--bf16") else "fp16" if flags.has("--fp16") else "fp32"
    narrow = flags.word("--fp8-format", ("hybrid", "e4m3"))
    recipes = {word: scaling for scaling, word in FP8_RECIPES.items()}
    recipe = flags.word("--fp8-recipe", ("mxfp8", *recipes)) or FP8_RECIPES["delayed"]
    flags.word("--fp4-recipe", ("nvfp4",))
    if flags.word("--fp4-format", ("e2m1",)):
        wide = "nvfp4"
    elif narrow and recipe == "mxfp8":
        wide = "mxfp8"
    elif narrow:
        wide = "fp8"
        stated.stack["fp8_scaling"] = recipes[recipe]
    stated.layout["precision"] = wide
    if wide == "fp32":
        stated.notes.append("neither --bf16 nor --fp16 is stated: it is counted as in fp32")
    if narrow:
        stated.stack["gathers_casts"] = flags.has("--fp8-param-gather")


def _stack(flags: Flags, stated: Stated) -> None:
    """What runs beside products, which is off unless it is asked for; DeepSpeed's engine has no such flags."""
    if flags.has(_BY_DEEPSPEED):
        return
    stated.stack |= {
        "overlap_dp": 1.0 if flags.has("--overlap-grad-reduce") else 0.0,
        "gathers_behind_forward": flags.has("--overlap-param-gather"),
        "sums_behind_products": flags.has("--tp-comm-overlap"),
    }
    graphs(flags, stated)
    if flags.has(ACCUMULATED_APART):
        stated.stack["fused_accumulation"] = "never"
    if flags.has("--grad-reduce-in-bf16"):
        stated.stack["grad_bytes_16bit"] = 2
    if not flags.has("--cross-entropy-loss-fusion"):
        stated.notes.append("without --cross-entropy-loss-fusion; the loss is counted as the stack has it")
