"""Token files: memory-mapped integers in a folder, and the index that describes them."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from trimaran.files.user_file import MIB, read_json, regular_file
from trimaran.nouns.noun import Noun, TrimaranError, first_error

INDEX_NAME = "index.json"
INDEX_BYTES = 64 * MIB


class TokenFile(Noun):
    """A file of little-endian integers: in the folder, or elsewhere by its absolute path."""

    name: str = Field(min_length=1)
    dtype: str = Field(pattern="^(u?int(8|16|32)|int64)$")
    tokens: int = Field(ge=0)
    part: int = Field(default=0, ge=0, description="which text of a blend it belongs to")


class TokenIndex(Noun):
    """What `index.json` says. `vocab` is 1 more than the largest token that can occur.

    Each part is a text of a blend and has a weight; the files of a part follow one another.
    """

    files: tuple[TokenFile, ...]
    weights: tuple[float, ...] = (1.0,)
    vocab: int = Field(gt=0)
    end_of_document: int = Field(ge=0)
    tokenizer: str
    documents: int = Field(ge=0)
    text_bytes: int = Field(ge=0)

    @property
    def tokens(self) -> int:
        """All tokens of all files."""
        return sum(file.tokens for file in self.files)


def read_index(folder: Path) -> TokenIndex:
    """The index of a folder of token files. Raises TrimaranError where it is missing or not an index."""
    path = folder / INDEX_NAME
    try:
        return TokenIndex.model_validate(
            read_json(path, f"data_dir {folder}: {path.name}", INDEX_BYTES, "delete the folder and prepare it again")
        )
    except ValidationError as error:
        raise TrimaranError(f"{path}: {first_error(error)}") from None


class Tokens:
    """All token files of a folder as a single sequence, read through the page cache.

    `parts` are (first token, last token + 1) of each text of a blend.
    """

    def __init__(self, folder: Path) -> None:
        self.index = read_index(folder)
        self._maps: list[NDArray[Any]] = []
        self._starts = [0]
        for file in self.index.files:
            path = folder / file.name
            if not file.tokens:
                continue  # an empty file cannot be mapped
            if not path.exists():
                raise TrimaranError(f"token file {path} is gone: delete the folder and prepare the data again")
            try:
                mapped = np.memmap(
                    regular_file(path, f"token file {path}", None),
                    dtype=np.dtype(file.dtype).newbyteorder("<"),
                    mode="r",
                )
            except (OSError, ValueError) as error:
                raise TrimaranError(f"token file {path} cannot be read ({error}): prepare the data again") from None
            if len(mapped) != file.tokens:
                raise TrimaranError(
                    f"token file {path} holds {len(mapped)} tokens, but its index says {file.tokens}: "
                    f"delete the folder and prepare the data again"
                )
            self._maps.append(mapped)
            self._starts.append(self._starts[-1] + file.tokens)
        self.parts: list[tuple[int, int]] = []
        begin = 0
        for part in range(len(self.index.weights)):
            end = begin + sum(file.tokens for file in self.index.files if file.part == part)
            self.parts.append((begin, end))
            begin = end

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, begin: int, count: int) -> NDArray[np.int64]:
        """`count` tokens from `begin` on, across file boundaries."""
        out = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            file = bisect_right(self._starts, begin + done) - 1
            offset = begin + done - self._starts[file]
            part = self._maps[file][offset : offset + count - done]
            out[done : done + len(part)] = part
            done += len(part)
        return out
