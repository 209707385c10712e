"""A configuration of another trainer, recognised and read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trimaran.files.user_file import MIB, read_json, read_text, read_toml
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.configs.accelerate import accelerate, is_accelerate
from trimaran.planner.configs.deepspeed import deepspeed, is_deepspeed
from trimaran.planner.configs.flags import flags_of
from trimaran.planner.configs.megatron.arguments import TELLING, megatron
from trimaran.planner.configs.nanotron import is_nanotron, nanotron
from trimaran.planner.configs.nested import nested_flags, yaml_document
from trimaran.planner.configs.others import refuse_adapters, refuse_module, refuse_other
from trimaran.planner.configs.primus import is_primus, primus
from trimaran.planner.configs.shell import training_words
from trimaran.planner.configs.slurm_directives import nodes_of
from trimaran.planner.configs.stated import Stated
from trimaran.planner.configs.torchtitan import sections_of_module, torchtitan
from trimaran.planner.export.megatron_words import WRITTEN_FOR

# Words that say what a file is, where its name and its settings do not.
FORMATS = ("auto", "megatron", "torchtitan", "nemo", "deepspeed")
# Scripts and configurations are of a few KiB.
_CONFIG_BYTES = MIB // 2
# Nested files of trainers that have sections of their own.
_RECOGNISED = ((is_nanotron, nanotron), (is_accelerate, accelerate), (is_primus, primus))
_EXPECTED = (
    "give Megatron-LM's arguments, a configuration of torchtitan, DeepSpeed, accelerate, nanotron or Primus, or a "
    "NeMo recipe as YAML"
)


def read_config(path: Path, form: str = "auto") -> Stated:
    """What a file states. Raises TrimaranError, in one line, where it cannot be read or is of no known kind."""
    if form not in FORMATS:
        raise TrimaranError(f"--as {form} is no configuration's form: it is one of {', '.join(FORMATS)}")
    what, kind = f"configuration {path.name}", path.suffix.lower()
    if kind == ".toml":
        return torchtitan(read_toml(path, what, _EXPECTED))
    if kind == ".json":
        return _nested(read_json(path, what, _CONFIG_BYTES, _EXPECTED), form, what)
    text = read_text(path, what, _CONFIG_BYTES, _EXPECTED)
    if "\x00" in text or "\x01" in text:
        raise TrimaranError(f"{what} is no text: {_EXPECTED}")
    if kind == ".py":
        if "torchtitan" not in text:
            refuse_module(text, what)
        return torchtitan(sections_of_module(text, what))
    if kind in (".yaml", ".yml"):
        return _nested(yaml_document(text, what), form, what)
    words, branches = training_words(text, TELLING)
    given, twice = flags_of(words)
    seen = _program(words, what)
    if not any(flag in given for flag in TELLING):
        raise TrimaranError(f"{what} states nothing that is known of a training: {_EXPECTED}")
    first = text.splitlines()[0]
    written_for = first.removeprefix(WRITTEN_FOR).partition(":")[0].strip() if first.startswith(WRITTEN_FOR) else ""
    stated = megatron(given, written_for)
    nodes, per_node = nodes_of(text)
    if stated.devices is None and nodes and per_node and per_node > 1:
        stated.devices = nodes * per_node
        stated.notes.append(f"{nodes} nodes of {per_node} devices each, by its #SBATCH lines")
    ranks = _ranks_of_one_node(words, given)
    if stated.devices is None and ranks:
        stated.devices = ranks
        stated.notes.append("--nnodes is not stated: one node, as torchrun takes it")
    stated.uncounted += seen
    if branches:
        stated.notes.append(
            "of conditions and loops that the script does not decide by itself each branch was taken once"
        )
    stated.notes += [f"{flag} is stated twice, and the last counts: {' '.join(given[flag])}" for flag in twice]
    return stated


def _ranks_of_one_node(words: Sequence[str], given: Mapping[str, Sequence[str]]) -> int | None:
    """The ranks that torchrun starts on a node, where nothing says on how many; None elsewhere."""
    started = any(re.search(r"(?:^|/)torchrun$|^torch\.distributed\.(?:run|launch)$", word) for word in words)
    ranks = next(iter(given.get("--nproc-per-node", ())), "")
    return int(ranks) if started and "--nnodes" not in given and re.fullmatch(r"\d{1,7}", ranks) else None


def _program(words: Sequence[str], what: str) -> list[str]:
    """What a command's program does beside the training of a decoder of text; raises TrimaranError where it does not.

    Programs by their names in Megatron-LM, whose arguments all of them take.
    """
    modules = [f"{after.replace('.', '/')}.py" for word, after in pairwise(words) if word in ("-m", "--module")]
    path = next((word for word in (*words, *modules[-1:]) if word.endswith(".py")), "")
    name, place = path.rpartition("/")[2], "/".join(path.split("/")[-2:])
    if re.search(r"generat|inference|server|eval", name):
        raise TrimaranError(f"{what} starts {name}, which trains nothing: give the script of a training")
    if re.search(r"bert|t5|ict|retro|vision|mamba", name):
        raise TrimaranError(f"{what} starts {name}, whose model is no decoder of text alone: no model here has that")
    return [f"what {place} trains beside the decoder of text"] if re.search(r"vlm|mimo|multimodal", place) else []


def _nested(document: Any, form: str, what: str) -> Stated:
    if not isinstance(document, dict):
        raise TrimaranError(f"{what} is no table of settings: {_EXPECTED}")
    if form == "auto":
        for recognises, reads in _RECOGNISED:
            if recognises(document):
                return reads(document)
        refuse_other(document, what)
    if form == "deepspeed" or (form == "auto" and is_deepspeed(document)):
        return deepspeed(document)
    refuse_adapters(document, what)
    given = nested_flags(document)
    if not any(flag in given for flag in TELLING):
        raise TrimaranError(f"{what} states nothing that is known of a training: {_EXPECTED}")
    return megatron(given)
