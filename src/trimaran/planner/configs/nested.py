"""Nested settings, YAML or JSON, as the flags that they stand for: Megatron-LM's --yaml-cfg, NeMo and Megatron-Bridge.

All three name their settings as Megatron-LM names its arguments, in sections of their own; NeMo 1's further names are a
table here (examples/nlp/language_modeling/conf/megatron_gpt_config.yaml at 8cfedd7).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from trimaran.nouns.noun import TrimaranError
from trimaran.planner.configs.shell import UNSET
from trimaran.planner.export.megatron_words import QUICK_GATE

MOST_NESTED = 32
_REFERENCE = re.compile(r"\$\{\.*([\w.]+)\}")
# NeMo's names of Megatron-LM's arguments, by the name alone or with its section.
_NAMES = {
    "encoder_seq_length": "--seq-length", "sequence_length": "--seq-length",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "activations_checkpoint_granularity": "--recompute-granularity",
    "activations_checkpoint_method": "--recompute-method",
    "activations_checkpoint_num_layers": "--recompute-num-layers",
    "layernorm_epsilon": "--norm-epsilon", "rotary_percentage": "--rotary-percent",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "num_moe_experts": "--num-experts", "fp8": "--fp8-format", "fp8_param": "--fp8-param-gather", "fp4": "--fp4-format",
    # fields that models of Megatron-Core read (core_v0.16.1, megatron/core/models/gpt/gpt_model.py, lines 179 to 188)
    "yarn_rotary_scaling_factor": "--rotary-scaling-factor", "yarn_mscale": "--mscale",
    "yarn_mscale_all_dim": "--mscale-all-dim",
    "trainer.devices": "--nproc-per-node", "num_gpus_per_node": "--nproc-per-node", "trainer.num_nodes": "--nnodes",
}  # fmt: skip
# Functions of an MLP that make it GeGLU, and not SwiGLU, where it is gated.
_GELUS = frozenset({"gelu", "quick_gelu", "fast_gelu"})
# What a name with one of these values stands for; None for nothing.
_VALUES: Mapping[tuple[str, str], str | None] = {
    ("share_embeddings_and_output_weights", "false"): "--untie-embeddings-and-output-weights",
    ("bias", "false"): "--disable-bias-linear", ("add_bias_linear", "false"): "--disable-bias-linear",
    ("qkv_bias", "true"): "--add-qkv-bias",
    ("grad_reduce_in_fp32", "false"): "--grad-reduce-in-bf16", ("grad_reduce_in_fp32", "true"): None,
    # what Megatron-LM has a flag to switch off
    ("gradient_accumulation_fusion", "false"): "--no-gradient-accumulation-fusion",
    ("gradient_accumulation_fusion", "true"): None,
    ("masked_softmax_fusion", "false"): "--no-masked-softmax-fusion",
    ("bias_swiglu_fusion", "false"): "--no-bias-swiglu-fusion", ("bias_gelu_fusion", "false"): "--no-bias-gelu-fusion",
    ("apply_rope_fusion", "false"): "--no-rope-fusion",
    ("activation", "swiglu"): "--swiglu", ("activation", "fast-swiglu"): "--swiglu", ("activation", "gelu"): None,
    ("activation", "squared-relu"): "--squared-relu", ("activation_func", "squared_relu"): "--squared-relu",
    ("activation", "geglu"): QUICK_GATE, ("activation", "fast-geglu"): QUICK_GATE,
    **{("activation_func", word): None for word in ("silu", "swiglu", *_GELUS)},
    ("yarn_correction_range_round_to_int", "false"): "--no-yarn-correction-range-round-to-int",
    ("yarn_correction_range_round_to_int", "true"): None,
    ("gated_linear_unit", "true"): "--swiglu",
    ("optim.name", "distributed_fused_adam"): "--use-distributed-optimizer",
    **{("trainer.precision", word): "--bf16" for word in ("bf16", "bf16-mixed", "bf16-true")},
    **{("trainer.precision", word): "--fp16" for word in ("16", "16-mixed", "16-true")},
    **{("mixed_precision", word): "--bf16" for word in ("bf16_mixed", "bf16-mixed")},
    **{("mixed_precision", word): "--fp16" for word in ("fp16_mixed", "16-mixed")},
    ("fp8", "true"): "--fp8-format=hybrid", ("fp8_hybrid", "true"): "--fp8-format=hybrid",
    ("fp8_e4m3", "true"): "--fp8-format=e4m3",
}  # fmt: skip
# Parts of a stage (megatron/core/transformer/enums.py, LayerType) by their letters.
_PARTS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}


def yaml_document(text: str, what: str) -> Any:
    """What a YAML file holds, plain values alone. Raises TrimaranError for what is no YAML, or nested without end."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise TrimaranError(f"{what} repeats a part by *{event.anchor}: write its values in its place")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_NESTED:
                raise TrimaranError(f"{what} is nested more than {MOST_NESTED} deep: correct it")
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise TrimaranError(f"{what} is not valid YAML{where}: {getattr(error, 'problem', None) or error}") from None


def nested_flags(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """The flags that the settings stand for; of a name in several sections the last one counts."""
    leaves = dict(_leaves(document, ""))
    given: dict[str, list[str]] = {}
    for path, value in leaves.items():
        name = path.rpartition(".")[2]
        for flag, values in _flags(path, name, _resolved(value, leaves)):
            given[flag] = values
    functions = [str(value).lower() for path, value in leaves.items() if path.rpartition(".")[2] == "activation_func"]
    if "--swiglu" in given and functions and functions[-1] in _GELUS:
        given = {flag: values for flag, values in given.items() if flag != "--swiglu"} | {QUICK_GATE: []}
    return given


def _flags(path: str, name: str, value: Any) -> Iterator[tuple[str, list[str]]]:
    section = ".".join(path.split(".")[-2:])
    text = str(value).lower() if isinstance(value, bool) else str(value)
    for key in (section, name):
        if (key, text) in _VALUES:
            if flag := _VALUES[key, text]:
                flag_name, equals, flag_value = flag.partition("=")
                yield flag_name, [flag_value] if equals else []
            return
    flag = _NAMES.get(section) or _NAMES.get(name) or f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return
    if value is True:
        yield flag, []
    elif isinstance(value, list):
        yield flag, [str(each) for each in value]
    else:
        yield flag, [_NORMS.get(text.lower(), text) if name == "normalization" else text]
    if name == "num_query_groups":
        yield "--group-query-attention", []


def _leaves(document: Any, path: str) -> Iterator[tuple[str, Any]]:
    function = document.get("_target_") if isinstance(document, dict) and document.get("_call_") is False else None
    if function and path.endswith("activation_func"):  # a function by its name, as Megatron-Bridge writes it
        yield path, str(function).rpartition(".")[2]
    elif isinstance(document, dict):
        for name, value in document.items():
            if str(name).startswith("_"):  # of what makes the section, as `_target_`
                continue
            plain_name = str(name).lstrip("-")  # Megatron-LM's own recipes for tests write `--num-layers: 32`
            yield from _leaves(value, f"{path}.{plain_name}" if path else plain_name)
    else:
        written = _written(path.rpartition(".")[2], document)
        plain = isinstance(written, list) and all(not isinstance(each, dict | list) for each in written)
        if plain or not isinstance(written, list):
            yield path, written


def _written(name: str, value: Any) -> Any:
    """A list as the text that Megatron-LM's argument of that name takes, where it takes one."""
    if name == "window_size" and isinstance(value, list):
        return ",".join(map(str, value))
    if name == "moe_layer_freq" and isinstance(value, list):
        return f"[{','.join(str(each) for each in value)}]"
    if name == "pipeline_model_parallel_layout" and isinstance(value, list):
        stages = [stage if isinstance(stage, list) else [stage] for stage in value]
        return "|".join("".join(_PARTS.get(str(part), "?") for part in stage) for stage in stages)
    return value


def _resolved(value: Any, leaves: Mapping[str, Any]) -> Any:
    """What `${model.hidden_size}` refers to, once; a reference to what is not there stays open."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return f"{UNSET}{value}{UNSET}" if isinstance(value, str) and "${" in value else value
    named = match[1].rpartition(".")[2]
    found = [other for path, other in leaves.items() if path.rpartition(".")[2] == named and other != value]
    return found[-1] if found and "${" not in str(found[-1]) else f"{UNSET}{value}{UNSET}"
