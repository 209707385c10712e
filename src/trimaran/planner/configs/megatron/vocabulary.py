"""How many words a model knows, which scripts seldom state: their tokenizer's text does, when it is read."""

from __future__ import annotations

from collections.abc import Iterable

from trimaran.files.catalogue import catalogue_name, catalogue_names, load_model
from trimaran.planner.configs.flags import Flags
from trimaran.planner.configs.stated import Stated
from trimaran.planner.export.megatron_words import TOKENIZER

# Of GPT-2's vocab.json, which Megatron's examples train with, and of Llama 2's tokenizer.model.
GPT2_VOCABULARY, LLAMA2_VOCABULARY = 50257, 32000
_BY_TYPE = {"GPT2BPETokenizer": ("GPT-2", GPT2_VOCABULARY), "Llama2Tokenizer": ("Llama 2", LLAMA2_VOCABULARY)}
# What Hugging Face's names of a model say beside the model: before it and behind it.
_BEFORE, _BEHIND = ("Meta-",), ("-Instruct", "-Base", "-Chat", "-hf")


def vocabulary(flags: Flags, stated: Stated) -> int | None:
    """The words: as stated, or those of the tokenizer that is named; None where neither says."""
    vocab, padded = flags.count("--vocab-size"), flags.count("--pad-vocab-size-to")
    # a path may begin in the environment; its end says whose vocabulary it is
    files = [word for flag in ("--vocab-file", "--merge-file") if flags.has(flag) for word in flags.given[flag]]
    said = flags.count("--padded-vocab-size")
    if vocab is not None or padded is not None or said is not None:
        return padded if vocab is None else vocab
    kind = flags.word(TOKENIZER) or ""
    named = _of_model(flags.given.get("--tokenizer-model", ()))
    known = _BY_TYPE["GPT2BPETokenizer"] if any("gpt2" in file for file in files) else named or _BY_TYPE.get(kind)
    if known is None:
        return None
    stated.notes.append(f"the vocabulary is that of {known[0]}'s tokenizer, {known[1]:,}")
    return known[1]


def _of_model(values: Iterable[str]) -> tuple[str, int] | None:
    """The catalogue's model by Hugging Face's name or path of its tokenizer, and that model's words."""
    for value in values:
        name = value.strip("'\"").rstrip("/").rpartition("/")[2]
        for part in _BEFORE:
            name = name.removeprefix(part)
        for part in _BEHIND:
            name = name.removesuffix(part)
        model = catalogue_name("models", name)
        if name and model in catalogue_names("models"):
            return model, load_model(model).vocab
    return None
