r"""Megatron-LM's token files: `corpus.bin` holds the tokens, `corpus.idx` where its sequences and documents lie.

An index holds, little-endian and without gaps: `MMIDIDX\0\0`; version 1 (u64); the dtype's code (u8); the number of
sequences (u64) and of document ends (u64, one more than documents); each sequence's length in tokens (i32); each
sequence's first byte in the .bin (i64); and the sequence at which each document begins, closed by their number (i64).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimaran.files.user_file import regular_file
from trimaran.nouns.noun import TrimaranError
from trimaran.train.text.tokens import Tokens

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
# Megatron-LM keeps tokens of smaller vocabularies in 16 bits.
_LARGEST_16_BIT = 65500
_READ_TOKENS = 1 << 22


@dataclass(frozen=True)
class MegatronIndex:
    """What an `.idx` says of its `.bin`."""

    path: Path
    dtype: str
    sequence_lengths: NDArray[np.int32]
    document_indices: NDArray[np.int64]

    @property
    def bin_path(self) -> Path:
        """The file of tokens."""
        return self.path.with_suffix(".bin")

    @property
    def tokens(self) -> int:
        """All tokens."""
        return int(self.sequence_lengths.sum(dtype=np.int64))

    @property
    def documents(self) -> int:
        """All documents."""
        return len(self.document_indices) - 1


def read_megatron(path: Path) -> MegatronIndex:
    """The index of a pair, by either file's path.

    Raises TrimaranError where a file is missing, not such a file or cut short, or where sequences do not follow
    one another in the .bin.
    """
    path = path.with_suffix(".idx")
    try:
        content = np.memmap(regular_file(path, f"data: {path}", None), dtype=np.uint8, mode="r")
        bin_path = path.with_suffix(".bin")
        bin_bytes = regular_file(bin_path, f"data: {bin_path}", None).stat().st_size
    except (OSError, ValueError, TrimaranError) as error:
        raise TrimaranError(f"data: {path} and its .bin cannot be read ({error}): give both files") from None
    if len(content) < _HEADER.size:
        raise TrimaranError(f"data: {path} is not a Megatron-LM index: it has {len(content)} bytes")
    magic, version, code, sequences, documents = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if magic != MAGIC or version != 1 or code not in _CODES:
        raise TrimaranError(f"data: {path} is not a Megatron-LM index of version 1 with integer tokens")
    needed = _HEADER.size + sequences * 12 + documents * 8
    if len(content) < needed:
        raise TrimaranError(f"data: {path} has {len(content)} bytes, its header asks for {needed}: it is cut short")
    lengths_end = _HEADER.size + sequences * 4
    pointers_end = lengths_end + sequences * 8
    lengths = content[_HEADER.size : lengths_end].view("<i4")
    pointers = content[lengths_end:pointers_end].view("<i8")
    index = MegatronIndex(path, _CODES[code], lengths, content[pointers_end:needed].view("<i8"))
    size = np.dtype(index.dtype).itemsize
    if index.tokens * size != bin_bytes:
        raise TrimaranError(
            f"data: {index.bin_path} has {bin_bytes} bytes, its index asks for {index.tokens * size}: it is cut short"
        )
    if not np.array_equal(pointers, (np.cumsum(lengths, dtype=np.int64) - lengths) * size):
        raise TrimaranError(f"data: sequences of {path} do not follow one another: write it anew with Megatron-LM")
    return index


def write_megatron(tokens: Tokens, prefix: Path) -> MegatronIndex:
    """Write `prefix.bin` and `prefix.idx`, a sequence for each document, byte for byte as Megatron-LM would.

    A document ends with the end-of-document token, as with Megatron-LM's `--append-eod`. The index is written last,
    so that a pair without an index was cut short. What finds no room is removed, and a pair that was there stays.
    Raises OSError where that is so.
    """
    dtype = np.dtype("uint16" if tokens.index.vocab < _LARGEST_16_BIT else "int32").newbyteorder("<")
    bin_path, idx_path = prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")
    partial = [path.with_name(f".{path.name}.partial") for path in (bin_path, idx_path)]
    try:
        _write_pair(tokens, dtype, *partial)
        idx_path.unlink(missing_ok=True)
        for written, path in zip(partial, (bin_path, idx_path), strict=True):
            written.replace(path)
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
    return read_megatron(idx_path)


def _write_pair(tokens: Tokens, dtype: np.dtype[Any], bin_path: Path, idx_path: Path) -> None:
    ends: list[NDArray[np.int64]] = []
    with bin_path.open("wb") as file:
        for begin, block in _blocks(tokens):
            file.write(block.astype(dtype).data)
            ends.append(np.flatnonzero(block == tokens.index.end_of_document) + begin + 1)
    bounds = np.unique(np.concatenate((*ends, [len(tokens)])))
    lengths = np.diff(bounds, prepend=0).astype("<i4")
    pointers = (bounds - lengths).astype("<i8") * dtype.itemsize
    code = next(code for code, name in _CODES.items() if name == dtype.name)
    with idx_path.open("wb") as file:
        file.write(_HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1))
        for array in (lengths, pointers, np.arange(len(lengths) + 1, dtype="<i8")):
            file.write(array.data)


def _blocks(tokens: Tokens) -> Iterator[tuple[int, NDArray[np.int64]]]:
    for begin in range(0, len(tokens), _READ_TOKENS):
        yield begin, tokens.read(begin, min(_READ_TOKENS, len(tokens) - begin))
