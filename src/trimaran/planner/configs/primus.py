"""AMD's Primus: an experiment in YAML that overrides settings of Megatron-LM or torchtitan, and names a model by file.

Facts of AMD-AGI/Primus at fd1eeab.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trimaran.files.catalogue import catalogue_names
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted
from trimaran.planner.configs.megatron.arguments import megatron
from trimaran.planner.configs.nested import nested_flags
from trimaran.planner.configs.stated import Stated
from trimaran.planner.configs.torchtitan import torchtitan
from trimaran.planner.export.torchtitan_flavors import FLAVORS

# primus/core/config/yaml_loader.py, line 12: a variable of the environment, and what it is where that has none.
_VARIABLE = re.compile(r"\$\{([^:{}]+):([^}]*)\}")
# What an experiment does not state: primus/configs/modules/megatron/pre_trainer.yaml and trainer_base.yaml, and
# primus/configs/models/megatron/language_model.yaml, lines 135 and 166.
_MEGATRON: Mapping[str, Any] = {
    "micro_batch_size": 2, "global_batch_size": 16, "seq_length": 1024, "bf16": True, "sequence_parallel": True,
    "use_distributed_optimizer": True, "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
# primus/configs/modules/torchtitan/pre_trainer.yaml, lines 94 to 96 and 102 to 106.
_TITAN: Mapping[str, Mapping[str, Any]] = {
    "activation_checkpoint": {"mode": "none", "selective_ac_option": "2"},
    "compile": {"enable": True, "components": ["model", "loss"]},
}
# Its own settings, which say where things lie and what is logged, or which kernels of AMD's run.
_BESIDE = re.compile(r".*sink_level$|log_avg_|disable_|enable_primus_turbo$|use_turbo_|turbo_|num_workers$")


def is_primus(document: Mapping[str, Any]) -> bool:
    """Whether a file is an experiment of Primus'."""
    return _trainer(document) is not None


def primus(document: Mapping[str, Any]) -> Stated:
    """What an experiment states; what it leaves out is as Primus has it. Raises TrimaranError naming a setting."""
    module = _trainer(document)
    assert module is not None
    noted: dict[str, str] = {}
    framework, model = (str(_plain(module.get(name, ""), noted)) for name in ("framework", "model"))
    overrides = _plain(module["overrides"], noted)
    if framework == "torchtitan":
        stated = torchtitan(_titan(overrides, model))
    elif framework == "megatron":
        stated = megatron(nested_flags({**_MEGATRON, **_dispatched(overrides)}))
        stated.model_name = _catalogued(model)
        stated.unread = [flag for flag in stated.unread if not _BESIDE.match(flag.lstrip("-").replace("-", "_"))]
        if stated.model_name is None:
            stated.named = model
    else:
        raise TrimaranError(f"framework is {quoted(framework)}: of Primus megatron and torchtitan can be said here")
    if noted:
        values = ", ".join(f"{name} {value}" for name, value in noted.items())
        stated.notes.append(f"as where the environment sets none of them: {values}")
    return stated


def _trainer(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The module that trains: the one that overrides settings of a framework."""
    modules = document.get("modules")
    each = modules.values() if isinstance(modules, Mapping) else ()
    found = (module for module in each if isinstance(module, Mapping) and "framework" in module)
    return next((module for module in found if isinstance(module.get("overrides"), Mapping)), None)


def _plain(value: Any, noted: dict[str, str]) -> Any:
    """A value, or all values of a section, with variables as they are where the environment has none."""
    if isinstance(value, Mapping):
        return {name: _plain(each, noted) for name, each in value.items()}
    if not isinstance(value, str) or not _VARIABLE.search(value):
        return value
    for name, usual in _VARIABLE.findall(value):
        noted[name] = usual
    text = _VARIABLE.sub(lambda found: found[2], value)
    words = {"true": True, "false": False, "null": None, "": None}
    return words.get(text.lower(), text)


def _dispatched(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with the dispatcher of Primus-Turbo as the one of Megatron-LM that it is."""
    settings = dict(overrides)
    if settings.get("enable_primus_turbo") and settings.get("use_turbo_deepep"):
        settings |= {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
    return settings


def _titan(overrides: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Sections of torchtitan, the usual ones filled in, and the model of the file that is named."""
    sections = {name: value for name, value in overrides.items() if isinstance(value, Mapping)}
    ours = {name: {**usual, **sections.get(name, {})} for name, usual in _TITAN.items()}
    stem = _stem(model)
    flavors = ((flavor, {flavor.function, name.replace("-", "_")}) for flavor, name in FLAVORS.items())
    known = next((flavor for flavor, names in flavors if names & {stem, stem.replace(".", "_")}), None)
    named: dict[str, Any] = {"name": known.name, "flavor": known.size} if known else {"name": model}
    stated = {name: value for name, value in sections.get("model", {}).items() if name != "converters"}
    if model.endswith("-fp8.yaml"):  # primus/configs/models/torchtitan/llama3.1_405B-fp8.yaml
        stated["converters"] = ["quantize.linear.float8"]
    sections.pop("primus_turbo", None)
    return {**sections, **ours, "model": {**named, **stated}}


def _catalogued(file: str) -> str | None:
    """The model of a file such as `llama3.1_70B.yaml`, by its name in the catalogue."""
    name = _stem(file).replace("_", "-")
    return name if name in catalogue_names("models") else None


def _stem(file: str) -> str:
    return re.sub(r"(?:_v0\.\d)?(?:-fp8)?\.yaml$", "", file).lower()
