"""Configurations that Megatron-Bridge prints of a training, as arguments by Megatron-LM's names.

Until 2026 it is YAML below `Task Configuration`, behind the set-up; since then what differs from Megatron-Core's
defaults (src/megatron/bridge/training/config.py, log_non_default_values).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_YAML = "------- Task Configuration -------"
_SUMMARY = "Configuration Summary (Non-Default Values vs Megatron Core)"
_MOST_LINES = 2000
# Those of the model come last and count most.
_SECTIONS = ("ddp", "dist", "optimizer", "train", "dataset", "tokenizer", "model")
_KEY = re.compile(r"( {0,8})([A-Za-z_]\w{0,80}):(?: (.{0,4000}))?$")
_TARGET = re.compile(r" {4}_target_: (\S{1,200})$")
_ITEM = re.compile(r" {2,4}- (\w{1,80})$")
_PART = re.compile(r"\[(\w{1,40})\](?: Non-default values \(vs Mcore (\w{1,80})\))?:$")
_DIFFERS = re.compile(r" {2}(\w{1,80}): (.{0,4000}?)(?: {2}\(Mcore default: .{0,4000}\))?$")
_WORDS = {"null": "None", "true": "True", "false": "False"}
# What a summary leaves out (megatron/core/transformer/transformer_config.py, optimizer/optimizer_config.py).
_DEFAULTS = {
    "tensor_model_parallel_size": "1", "pipeline_model_parallel_size": "1", "context_parallel_size": "1",
    "virtual_pipeline_model_parallel_size": "None", "expert_model_parallel_size": "1", "num_query_groups": "None",
    "num_moe_experts": "None", "moe_router_topk": "2", "moe_ffn_hidden_size": "None",
    "moe_token_dispatcher_type": "allgather", "recompute_granularity": "None", "params_dtype": "torch.float32",
}  # fmt: skip
_OTHER_DEFAULTS = {"optimizer": {"optimizer": "adam"}, "ddp": {"use_distributed_optimizer": "False"}}
_LATENT = "MLATransformerConfig"
_NAMES = {
    "num_moe_experts": "num_experts",
    "vocab_size": "padded_vocab_size",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}


def is_configuration(line: str) -> bool:
    """Whether a configuration begins in a line."""
    return _YAML in line or _SUMMARY in line


def arguments_at(lines: Sequence[str]) -> dict[int, dict[str, str]]:
    """Arguments by the line in which the configuration that states them begins."""
    found = {}
    for at, line in enumerate(lines):
        if is_configuration(line):
            yaml = _YAML in line
            body = _body(lines, at, line[: line.index(_YAML if yaml else _SUMMARY)])
            found[at] = _arguments(_of_yaml(body) if yaml else _of_summary(body))
    return found


def _body(lines: Sequence[str], at: int, prefix: str) -> Iterator[str]:
    """The lines of a configuration behind its first, without what a launcher puts before each."""
    return (line.removeprefix(prefix).rstrip() for line in lines[at + 1 : at + _MOST_LINES])


def _of_yaml(body: Iterator[str]) -> dict[str, dict[str, str]]:
    """Settings of each section, those alone that are words, lists of words or names of a class."""
    sections: dict[str, dict[str, str]] = {}
    settings: dict[str, str] = {}
    name = ""
    for line in body:
        if line.startswith("-----"):
            break
        if key := _KEY.match(line):
            if not key[1]:
                settings, name = sections.setdefault(key[2], {}), ""
            elif len(key[1]) == 2:
                name = key[2]
                settings[name] = _word(key[3] or "")
            elif (target := _TARGET.match(line)) and settings.get(name) == "":
                settings[name] = target[1]
        elif (item := _ITEM.match(line)) and name:
            settings[name] = f"{settings[name]} {item[1]}".strip()
    return sections


def _of_summary(body: Iterator[str]) -> dict[str, dict[str, str]]:
    """Settings of each section; what it does not name of Megatron-Core's own is the default."""
    sections = {name: dict(settings) for name, settings in {"model": _DEFAULTS, **_OTHER_DEFAULTS}.items()}
    settings: dict[str, str] | None = None
    for line in body:
        if line.startswith("=====") and settings is not None:
            break
        if part := _PART.match(line):
            settings = sections.setdefault(part[1], {})
            if part[2] == _LATENT:
                settings["multi_latent_attention"] = "True"
        elif settings is not None and (differs := _DIFFERS.match(line)):
            settings[differs[1]] = _word(differs[2])
    return sections


def _word(text: str) -> str:
    return _WORDS.get(text, text.strip("'\""))


def _arguments(sections: dict[str, dict[str, str]]) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for section in _SECTIONS:
        for name, value in sections.get(section, {}).items():
            # the longest that the model takes is no length of the data's
            if name in ("seq_length", "sequence_length") and section == "dataset":
                arguments["seq_length"] = value
            elif name not in ("seq_length", "sequence_length"):
                arguments[_NAMES.get(name, name)] = value
    if scheme := sections.get("peft", {}).get("_target_", ""):
        arguments["peft"] = scheme.rpartition(".")[2]
    # a summary does not tell the activation, which takes as long in a gated MLP
    activation = arguments.get("activation_func", "silu").rpartition(".")[2]
    if arguments.get("gated_linear_unit") == "True":
        arguments["geglu" if "gelu" in activation else "swiglu"] = "True"
    elif activation == "squared_relu":
        arguments["squared_relu"] = "True"
    return arguments
