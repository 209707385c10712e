"""DataSettings: the text that a training reads, and how it is tokenised."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from trimaran.nouns.noun import Noun

# Words that name no file.
STDLIB_WORDS = ("python-stdlib",)
TOKENIZER_WORDS = ("bytes", "bpe")
_Paths = tuple[Annotated[str, Field(min_length=1)], ...]


def is_megatron(path: str) -> bool:
    """Whether a path names a file of Megatron-LM's tokens, which come in pairs."""
    return path.endswith((".bin", ".idx"))


class BlendedText(Noun):
    """One text of a blend, and the share of samples that come from it (weights need not add up to 1)."""

    paths: _Paths = Field(min_length=1)
    weight: float = Field(gt=0, le=1e9)


class DataSettings(Noun):
    """Text to train on: files or folders, and how they are tokenised.

    `paths` are .txt-like, .jsonl or .ndjson (packed: .jsonl.gz, .json.gz, .jsonl.zst, .json.zst) or .parquet files,
    folders of them, Megatron-LM's .bin and .idx (used where they lie), or the word `python-stdlib` for the source of
    the running Python's standard library. `blend` names several texts instead, each with a weight. `tokenizer` is
    `bytes`, `bpe` (trained on the text to the model's vocabulary) or a path to a `tokenizer.json`.
    """

    paths: _Paths = STDLIB_WORDS
    blend: tuple[BlendedText, ...] = ()
    tokenizer: str = "bytes"
    text_field: str = "text"
    max_mib: float | None = Field(default=None, gt=0, description="stop reading a text after so much of it")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.paths:
            raise ValueError("paths is empty: name at least one file, or leave it out")
        if self.blend and self.paths != STDLIB_WORDS:
            raise ValueError("paths and blend are both stated: name every text in blend, or none")
        return self

    @property
    def texts(self) -> tuple[BlendedText, ...]:
        """The texts of the blend, or the one text that there is."""
        return self.blend or (BlendedText(paths=self.paths, weight=1.0),)
