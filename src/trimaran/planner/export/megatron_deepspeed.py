"""Flags and DeepSpeed configuration of Megatron-DeepSpeed (BigScience's, 2022; ZeRO 2 and 3 are deepspeedai's)."""

from __future__ import annotations

import json

from trimaran.layout.axes import USUAL_PLACEMENT
from trimaran.nouns.model import padded_vocab
from trimaran.nouns.precision import PrecisionName
from trimaran.nouns.stack import Schedule
from trimaran.planner.export.asked import Asked
from trimaran.planner.export.deepspeed import deepspeed_config
from trimaran.planner.export.megatron_lm import batch_flags, joined, model_flags, parallel_flags
from trimaran.planner.export.megatron_words import DROPOUTS, OLD_POSITIONS
from trimaran.planner.export.refuse import refuse_first, untold_degrees, untold_traits

# What it has: whatever else a layout chooses is refused.
_SCHEDULES: tuple[Schedule, ...] = ("none", "1f1b")
_PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "fp16", "bf16")


def megatron_deepspeed(asked: Asked) -> str:
    """A here-document for the configuration file, then one flag a line."""
    layout, workload, stack = asked.layout, asked.workload, asked.stack
    model = workload.model
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
        ),
    )
    config = deepspeed_config(layout, workload)
    if workload.ramp_up:
        # The trainer sets the batch while it grows; DeepSpeed is told the micro-batch alone.
        config = {name: value for name, value in config.items() if name != "gradient_accumulation_steps"}
    flags = [*model_flags(workload), f"--position-embedding-type {OLD_POSITIONS[model.positions]}"]
    if model.embedding_norm:
        flags.append("--embed-layernorm")
    flags += [f"{flag} {model.dropout:g}" for flag in DROPOUTS]
    # The tokenizer is the user's to name, by --tokenizer-type: the trainer does not start without one.
    flags.append(f"--pad-vocab-size-to {padded_vocab(model.vocab, layout.tp)}")
    flags += [*parallel_flags(layout), *batch_flags(layout, workload)]
    if layout.recompute == "full":
        flags += ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
        flags.append("--checkpoint-num-layers 1")
    if ends_count:
        flags.append("--pp-partition-method 'type:transformer|embedding'")
    if layout.pp == 1 and layout.zero_stage > 1:
        # deepspeedai's, whose engine of pipelines has no ZeRO 2 and 3; BigScience's has no such flag, nor these
        flags.append("--no-pipeline-parallel")
    flags += ["--deepspeed", "--deepspeed_config ds_config.json", f"--zero-stage {layout.zero_stage}"]
    return f"cat > ds_config.json <<'END'\n{json.dumps(config, indent=2)}\nEND\n{joined(flags)}"
