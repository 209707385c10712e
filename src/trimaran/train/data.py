"""Data: text to token files, once. `python -m trimaran.train.data JOB.json` prints the folder made.

JOB.json is a `trimaran.recipe.DataJob`. The folder is named after a hash of the text and of how it
is tokenised, so that the same text is never tokenised twice and changed text never mistaken.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from trimaran.noun import TrimaranError, first_error
from trimaran.recipe import DataJob, DataSettings
from trimaran.train.text import MIB, documents, text_files
from trimaran.train.tokenizer import Bytes, HuggingFace, Tokenizer, batches, load_tokenizer, train_bpe
from trimaran.train.tokens import INDEX_NAME, TokenFile, TokenIndex, read_index

# Raised when the meaning of the files changes: older folders are then made anew.
FORMAT = 1
FILE_TOKENS = 1 << 28
DOCUMENTS_AT_ONCE = 256


def fingerprint(job: DataJob) -> str:
    """A hash of all that decides the tokens: the text itself, the tokenizer, and the vocabulary of a BPE."""
    data = job.data
    seen = hashlib.blake2b(digest_size=12)
    seen.update(repr((FORMAT, data.tokenizer, data.text_field, data.max_mib)).encode())
    if data.tokenizer == "bpe":
        seen.update(str(job.vocab).encode())
    files = text_files(data)
    if data.tokenizer not in ("bytes", "bpe"):
        files.append(Path(data.tokenizer).expanduser())
    left = float("inf") if data.max_mib is None else data.max_mib * MIB
    for file in files:
        try:
            with file.open("rb") as opened:
                content = hashlib.file_digest(opened, "blake2b").digest()
            left -= file.stat().st_size
        except OSError as error:
            raise TrimaranError(f"data: {file} cannot be read: {error.strerror}") from None
        seen.update(file.suffix.encode() + content)
        if left <= 0 and file.suffix not in (".parquet", ".json"):
            # what lies beyond `max_mib` of plain text is not read, so it does not count
            break
    return seen.hexdigest()


def make_tokenizer(data: DataSettings, vocab: int) -> Tokenizer:
    """The tokenizer that the settings name. Raises TrimaranError where it has more tokens than the model."""
    tokenizer: Tokenizer
    if data.tokenizer == "bytes":
        tokenizer = Bytes()
    elif data.tokenizer == "bpe":
        tokenizer = train_bpe(documents(data), vocab)
    else:
        tokenizer = load_tokenizer(Path(data.tokenizer).expanduser())
    if tokenizer.vocab > vocab:
        raise TrimaranError(
            f"data.tokenizer {data.tokenizer} has {tokenizer.vocab} tokens, model.vocab is {vocab}: raise model.vocab"
        )
    return tokenizer


def prepare(job: DataJob) -> Path:
    """The folder of token files for `job`, made now unless it is there."""
    folder = Path(job.cache_dir) / fingerprint(job)
    if (folder / INDEX_NAME).exists():
        read_index(folder)
        return folder
    partial = folder.with_name(f"{folder.name}.partial.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write(job, partial)
        try:
            partial.rename(folder)
        except OSError:
            # another process was first; its files are the same
            read_index(folder)
    except OSError as error:
        raise TrimaranError(f"cache_dir {job.cache_dir} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write(job: DataJob, folder: Path) -> None:
    tokenizer = make_tokenizer(job.data, job.vocab)
    dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
    writer = _Writer(folder, dtype)
    count = text_bytes = 0
    for batch in batches(documents(job.data), DOCUMENTS_AT_ONCE):
        for tokens in tokenizer.encode(batch):
            writer.write(np.append(tokens, np.uint32(tokenizer.end_of_document)))
        count += len(batch)
        text_bytes += sum(len(document.encode(errors="replace")) for document in batch)
    if isinstance(tokenizer, HuggingFace):
        tokenizer.inner.save(str(folder / "tokenizer.json"))
    index = TokenIndex(
        dtype=dtype,
        files=writer.close(),
        vocab=tokenizer.vocab,
        end_of_document=tokenizer.end_of_document,
        tokenizer=job.data.tokenizer,
        documents=count,
        text_bytes=text_bytes,
    )
    (folder / INDEX_NAME).write_text(index.model_dump_json(indent=1))


class _Writer:
    """Appends tokens to files of at most FILE_TOKENS, cut at documents."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._files: list[TokenFile] = []
        self._open_next()

    def _open_next(self) -> None:
        self._name = f"tokens-{len(self._files):05d}.bin"
        self._file = (self._folder / self._name).open("wb")
        self._tokens = 0

    def write(self, tokens: NDArray[np.uint32]) -> None:
        """Append one document."""
        if self._tokens and self._tokens + len(tokens) > FILE_TOKENS:
            self.close()
            self._open_next()
        tokens.astype(self._dtype).tofile(self._file)
        self._tokens += len(tokens)

    def close(self) -> tuple[TokenFile, ...]:
        """Finish the file at hand; all files so far."""
        self._file.close()
        self._files.append(TokenFile(name=self._name, tokens=self._tokens))
        return tuple(self._files)


def main(arguments: list[str]) -> int:
    """Prepare the data of a job file and print its folder; returns the exit status."""
    if len(arguments) != 1:
        print("usage: python -m trimaran.train.data JOB.json", file=sys.stderr)
        return 2
    try:
        job = DataJob.model_validate_json(Path(arguments[0]).read_text())
        print(prepare(job))
    except OSError as error:
        print(f"trimaran: job {arguments[0]} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    except ValidationError as error:
        print(f"trimaran: job {arguments[0]}: {first_error(error)}", file=sys.stderr)
        return 2
    except TrimaranError as error:
        print(f"trimaran: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
