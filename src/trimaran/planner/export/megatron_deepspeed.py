"""Flags and DeepSpeed configuration of Megatron-DeepSpeed (BigScience's, 2022; ZeRO 2 and 3 are deepspeedai's)."""

from __future__ import annotations

import json

from trimaran.layout.axes import USUAL_PLACEMENT
from trimaran.nouns.model import Model, padded_vocab
from trimaran.nouns.precision import PrecisionName
from trimaran.nouns.stack import Schedule
from trimaran.nouns.workload import Workload
from trimaran.planner.export.asked import Asked
from trimaran.planner.export.deepspeed import deepspeed_config
from trimaran.planner.export.megatron_lm import batch_flags, joined, model_flags, parallel_flags
from trimaran.planner.export.megatron_words import DROPOUTS, OLD_POSITIONS
from trimaran.planner.export.refuse import refuse_first, untold_degrees, untold_traits

# What it has: whatever else a layout chooses is refused.
_SCHEDULES: tuple[Schedule, ...] = ("none", "1f1b")
_PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "fp16", "bf16")
# What both take where it is not stated (megatron/arguments.py, _add_network_size_args).
_ROTARY_BASE, _NORM_EPSILON = 10_000.0, 1e-5


def megatron_deepspeed(asked: Asked) -> str:
    """A here-document for the configuration file, then one flag a line."""
    layout, workload, stack = asked.layout, asked.workload, asked.stack
    model = workload.model
    # of which ZeRO 2 and 3 are deepspeedai's, and all else is BigScience's of 2022 too
    of_2022 = layout.zero_stage < 2
    # DeepSpeed can count the embedding and the head as a layer each, as BLOOM's training did.
    ends_count = model.layers % layout.pp > 0 and stack.ends_count_as_layers and (model.layers + 2) % layout.pp == 0
    refuse_first(
        "Megatron-DeepSpeed",
        layout,
        (
            (layout.schedule not in _SCHEDULES, f"the {layout.schedule} schedule"),
            (layout.pp > 1 and layout.zero_stage > 1, f"ZeRO stage {layout.zero_stage} under a pipeline"),
            (layout.sequence_parallel, "sequence parallelism"),
            (layout.recompute not in ("none", "full"), f"{layout.recompute} recompute"),
            (layout.precision not in _PRECISIONS, f"precision {layout.precision}"),
            (layout.recompute_every > 1, f"recomputing one layer in {layout.recompute_every}"),
            *untold_degrees(layout),
            (layout.placement != USUAL_PLACEMENT, f"placement {'-'.join(layout.placement)}"),
            (len(set(layout.stage_split)) > 1, "a stated stage split"),
            (model.layers % layout.pp > 0 and not ends_count, f"{model.layers} layers on {layout.pp} stages"),
            *untold_traits(model),
            (model.kv_heads != model.heads, "grouped queries"),
            (model.norm != "layernorm", f"norm {model.norm}"),
            (model.mlp != "gelu", f"MLP {model.mlp}"),
            (not model.bias, "linear layers without bias"),
            (not model.tied_embedding, "an untied output matrix"),
            (model.head != "vocabulary", f"a {model.head} head"),
            *_untold_positions(model, of_2022, layout.zero_stage),
        ),
    )
    config = deepspeed_config(layout, workload)
    if workload.ramp_up:
        # The trainer sets the batch while it grows; DeepSpeed is told the micro-batch alone.
        config = {name: value for name, value in config.items() if name != "gradient_accumulation_steps"}
    flags = _shape_flags(workload, of_2022)
    if model.embedding_norm:
        flags.append("--embed-layernorm")
    flags += [f"{flag} {model.dropout:g}" for flag in DROPOUTS]
    # The tokenizer is the user's to name, by --tokenizer-type: the trainer does not start without one.
    vocab = f"--pad-vocab-size-to {padded_vocab(model.vocab, layout.tp)}" if of_2022 else f"--vocab-size {model.vocab}"
    flags.append(vocab)
    flags += [*parallel_flags(layout), *batch_flags(layout, workload)]
    if layout.recompute == "full":
        flags += ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
        flags.append("--checkpoint-num-layers 1")
    if ends_count:
        flags.append("--pp-partition-method 'type:transformer|embedding'")
    if not of_2022:
        # whose engine of pipelines has no ZeRO 2 and 3
        flags.append("--no-pipeline-parallel")
    flags += ["--deepspeed", "--deepspeed_config ds_config.json", f"--zero-stage {layout.zero_stage}"]
    return f"cat > ds_config.json <<'END'\n{json.dumps(config, indent=2)}\nEND\n{joined(flags)}"


def _untold_positions(model: Model, of_2022: bool, zero_stage: int) -> tuple[tuple[bool, str], ...]:
    """What of positions and of the embedding one of the two has no flag for, as what refuse_first takes.

    BigScience's has angles of base 10,000 alone (megatron/model/positional_embeddings.py), deepspeedai's neither ALiBi
    nor a norm behind the embedding.
    """
    is_rotary, in_stage = model.positions == "rotary", f"in ZeRO stage {zero_stage}"
    return (
        (is_rotary and model.rotary_scaling is not None, "rotary scaling"),
        (is_rotary and of_2022 and model.rotary_theta != _ROTARY_BASE, f"a rotary base of {model.rotary_theta:g}"),
        (is_rotary and model.rotary_theta % 1 > 0, f"a rotary base that is no whole number, {model.rotary_theta}"),
        (model.positions == "alibi" and not of_2022, f"ALiBi positions {in_stage}"),
        (model.embedding_norm and not of_2022, f"a norm after the embedding {in_stage}"),
    )


def _shape_flags(workload: Workload, of_2022: bool) -> list[str]:
    """Sizes, norms and positions.

    BigScience's asserts that rotary positions come without a number of them (megatron/arguments.py at 007719a), and
    deepspeedai's, which asks for that number, has a switch in place of the word (the same at 207b2d5).
    """
    model, flags = workload.model, model_flags(workload)
    if model.head_dim * model.heads != model.hidden:
        flags.append(f"--kv-channels {model.head_dim}")
    if model.norm_epsilon != _NORM_EPSILON:
        flags.append(f"--layernorm-epsilon {model.norm_epsilon:.10g}")
    if of_2022:
        if model.positions == "rotary":
            flags = [flag for flag in flags if not flag.startswith("--max-position-embeddings")]
        return [*flags, f"--position-embedding-type {OLD_POSITIONS[model.positions]}"]
    if model.positions == "rotary":
        flags += ["--use-rotary-position-embeddings", f"--rotary-position-embeddings-theta {model.rotary_theta:.0f}"]
    return flags
