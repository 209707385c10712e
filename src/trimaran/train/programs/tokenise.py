"""Tokenise: text to token files, once. `python -m trimaran.train.programs.tokenise JOB.json` prints the folder.

JOB.json is a `trimaran.protocol.job.DataJob`. The folder is named after a hash of the text and of how it
is tokenised, so that the same text is never tokenised twice, and changed text is never mistaken for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from trimaran.files.user_file import from_home
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol import progress
from trimaran.protocol.job import DataJob, Training
from trimaran.recipe.data_settings import TOKENIZER_WORDS, BlendedText, DataSettings, is_megatron
from trimaran.train.programs.run_job import run_job
from trimaran.train.run.samples import held_out_samples
from trimaran.train.run.trackers import require_trackers
from trimaran.train.text.digests import Digests
from trimaran.train.text.megatron_data import MegatronIndex, read_megatron, write_megatron
from trimaran.train.text.sampler import Sampler
from trimaran.train.text.text_files import MIB, documents, form, plain_text_size, text_files, text_size
from trimaran.train.text.tokenizer import Bytes, Tokenizer, batches, load_tokenizer, train_bpe
from trimaran.train.text.tokens import INDEX_NAME, TokenFile, TokenIndex, Tokens, read_index

# Increased when the meaning of the files changes, or text and tokenizers are read such that the same text gives other
# tokens: the text of older folders is then tokenised again.
FORMAT = 4
FILE_TOKENS = 1 << 28
LEFT_OVER_AFTER_S = 86400.0
DOCUMENTS_AT_ONCE = 256


def fingerprint(job: DataJob) -> str:
    """A hash of all that determines the tokens: the text itself, the tokenizer, and the vocabulary of a BPE.

    Token files of Megatron-LM, which may be large, count by path, size and time. Of text that has not changed since it
    was read the digest is remembered.
    """
    data, digests = job.data, Digests(Path(job.cache_dir) / "digests.json")
    checksum = hashlib.blake2b(digest_size=12)
    from_file = data.tokenizer not in TOKENIZER_WORDS
    # a tokenizer of a file counts by what the file holds, wherever it lies
    tokenizer = Path(data.tokenizer).name if from_file else data.tokenizer
    checksum.update(repr((FORMAT, tokenizer, data.text_field, data.max_mib)).encode())
    if data.tokenizer == "bpe":
        checksum.update(str(job.vocab).encode())
    if from_file:
        _add_files(checksum, digests, "data.tokenizer", [from_home(data.tokenizer)], None, "")
    for text in data.texts:
        for index in _megatron_indices(text):
            for path in (index.path, index.bin_path):
                status = path.stat()
                checksum.update(repr((str(path.resolve()), status.st_size, status.st_mtime_ns)).encode())
        _add_files(checksum, digests, "data.paths", text_files(text), data.max_mib, data.text_field)
        if data.blend:
            checksum.update(repr(text.weight).encode())
    digests.keep()
    return checksum.hexdigest()


def _add_files(
    checksum: hashlib.blake2b,
    digests: Digests,
    field: str,
    files: list[Path],
    max_mib: float | None,
    text_field: str,
) -> None:
    left = most = math.inf if max_mib is None else max_mib * MIB
    for file in files:
        size = 0
        try:
            content = bytes.fromhex(digests.of(file, f"{field}: {file}"))
            if max_mib is not None:
                size = plain_text_size(file, text_field)
            held = form(file, text_field)
        except OSError as error:
            raise TrimaranError(f"{field}: {file} cannot be read: {error.strerror}; check the path") from None
        left -= size
        checksum.update(held.encode() + content)
        if size > most:
            checksum.update(b"its beginning")  # such a file was read whole before
        if left <= 0:
            # text beyond `max_mib` is not read, so it does not count
            break


def _megatron_indices(text: BlendedText) -> list[MegatronIndex]:
    """The Megatron-LM files that a text names, each once however it is named."""
    paths = [from_home(path).with_suffix(".idx") for path in text.paths if is_megatron(path)]
    return [read_megatron(path) for path in dict.fromkeys(paths)]


def make_tokenizer(data: DataSettings, vocab: int) -> Tokenizer:
    """The tokenizer that the settings name. Raises TrimaranError where it has more tokens than the model."""
    tokenizer: Tokenizer
    if data.tokenizer == "bytes":
        tokenizer = Bytes()
    elif data.tokenizer == "bpe":
        if any(is_megatron(path) for text in data.texts for path in text.paths):
            raise TrimaranError(
                "data.tokenizer bpe is trained on text, and data.paths name token files: "
                "name the tokenizer.json that they were made with"
            )
        tokenizer = train_bpe([documents(text, data) for text in data.texts], vocab)
    else:
        tokenizer = load_tokenizer(from_home(data.tokenizer))
    _check_vocab(data, tokenizer.vocab, vocab)
    return tokenizer


def _check_vocab(data: DataSettings, tokens: int, vocab: int) -> None:
    """Raise TrimaranError where a tokenizer has more tokens than the model."""
    if tokens > vocab:
        raise TrimaranError(
            f"data.tokenizer {data.tokenizer} has {tokens} tokens, model.vocab is {vocab}: raise model.vocab"
        )


def _unwritten(what: str, error: OSError) -> str:
    return f"{what} cannot be written: {error.strerror or error}; free space or choose another path"


def prepare(job: DataJob) -> Path:
    """The folder of token files for `job`, which is written unless it is there.

    Raises TrimaranError where it cannot be written, a text or tokenizer cannot be read, or the model has fewer tokens.
    """
    folder = Path(job.cache_dir) / fingerprint(job)
    if (folder / INDEX_NAME).exists():
        _check_vocab(job.data, read_index(folder).vocab, job.vocab)
        return folder
    _remove_left_overs(folder.parent)
    partial = folder.with_name(f"{folder.name}.partial.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write(job, partial)
        try:
            partial.rename(folder)
        except OSError:
            # another process has written the same files first
            read_index(folder)
    except OSError as error:
        raise TrimaranError(_unwritten(f"token files in {job.cache_dir}", error)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _remove_left_overs(cache_dir: Path) -> None:
    """Remove the unfinished folders of killed processes."""
    for partial in cache_dir.glob("*.partial.*"):
        # Where machines share the folder, the process may run on another, and its number says nothing here. So a folder
        # is removed only if, besides, nothing was written to it for a day: no process at work pauses that long.
        with contextlib.suppress(OSError):
            written = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
            if time.time() - written > LEFT_OVER_AFTER_S and not Path("/proc", partial.suffix[1:]).exists():
                shutil.rmtree(partial, ignore_errors=True)


def _write(job: DataJob, folder: Path) -> None:
    tokenizer = make_tokenizer(job.data, job.vocab)
    tokenizer.save(folder / "tokenizer.json")
    dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
    files: list[TokenFile] = []
    count = text_bytes = 0
    progress_shown = _Progress(sum(text_size(text, job.data.max_mib) for text in job.data.texts))
    for part, text in enumerate(job.data.texts):
        for pair in _megatron_indices(text):
            path = str(pair.bin_path.resolve())
            files.append(TokenFile(name=path, dtype=pair.dtype, tokens=pair.tokens, part=part))
            count += pair.documents
        writer = _Writer(folder, dtype, part)
        for batch in batches(documents(text, job.data), DOCUMENTS_AT_ONCE):
            for tokens in tokenizer.encode(batch):
                writer.write(np.append(tokens, np.uint32(tokenizer.end_of_document)))
            count += len(batch)
            text_bytes += sum(len(document.encode(errors="replace")) for document in batch)
            progress_shown.tell(text_bytes)
        files += writer.close()
    index = TokenIndex(
        files=tuple(files),
        weights=tuple(text.weight for text in job.data.texts),
        vocab=tokenizer.vocab,
        end_of_document=tokenizer.end_of_document,
        tokenizer=job.data.tokenizer,
        documents=count,
        text_bytes=text_bytes,
    )
    (folder / INDEX_NAME).write_text(index.model_dump_json(indent=1))


class _Progress:
    """Tells now and then how much of the text is tokenised and how long the rest takes."""

    EVERY_S = 2.0

    def __init__(self, total_bytes: float) -> None:
        self._total, self._begin = total_bytes, time.monotonic()
        self._told = self._begin

    def tell(self, done_bytes: int) -> None:
        """Tell that so many bytes are done, unless there was a message a moment ago."""
        now = time.monotonic()
        if now - self._told < self.EVERY_S or not 0 < done_bytes < self._total:
            return
        self._told = now
        left_s = (now - self._begin) * (self._total - done_bytes) / done_bytes
        done, total = done_bytes / MIB, self._total / MIB
        progress.tell(f"tokenised {done:.1f} of {total:.1f} MiB, about {left_s:.0f} s left")


class _Writer:
    """Appends tokens of a text to files of at most FILE_TOKENS, cut between documents."""

    def __init__(self, folder: Path, dtype: str, part: int) -> None:
        self._folder, self._dtype, self._part = folder, dtype, part
        self._files: list[TokenFile] = []
        self._file: BinaryIO | None = None
        self._tokens = 0

    def write(self, tokens: NDArray[np.uint32]) -> None:
        """Append a document."""
        if self._file is None or (self._tokens and self._tokens + len(tokens) > FILE_TOKENS):
            self.close()
            self._name = f"tokens-{self._part:03d}-{len(self._files):05d}.bin"
            self._file = (self._folder / self._name).open("wb")
        # NumPy's own tofile has no words of the system for a full disk
        self._file.write(tokens.astype(np.dtype(self._dtype).newbyteorder("<")).data)
        self._tokens += len(tokens)

    def close(self) -> list[TokenFile]:
        """Finish the current file; returns all files so far."""
        if self._file is not None:
            self._file.close()
            self._files.append(TokenFile(name=self._name, dtype=self._dtype, tokens=self._tokens, part=self._part))
            self._file, self._tokens = None, 0
        return self._files


def _check_training(training: Training, folder: Path) -> None:
    """Raise TrimaranError where the text, or what is held out of it, is too little, or the first weights do not fit."""
    tokens, settings = Tokens(folder), training.train
    Sampler(tokens, training.workload.seq_len, settings.seed, validation=settings.validation)
    if training.train.eval_every is not None and not training.trials:
        held_out_samples(tokens, training.workload, settings)
    if training.train.init_from is not None:
        # the libraries that read weights, which most texts are tokenised without
        from trimaran.train.state.weight_source import check_same_model, open_source

        source = open_source(from_home(training.train.init_from))
        check_same_model(source, training.workload.model, "train.init_from")


def tokenise(job: DataJob) -> None:
    """Tokenise the job's text and print the name of the folder of token files, which is below `cache_dir`.

    Raises TrimaranError for what the training that is to follow would be refused for, trackers before the text is read.
    """
    if job.training is not None and not job.training.trials:
        require_trackers(job.training.train.track)
    folder = prepare(job)
    if job.training is not None:
        _check_training(job.training, folder)
    if job.megatron is not None:
        try:
            write_megatron(Tokens(folder), Path(job.megatron))
        except OSError as error:
            raise TrimaranError(_unwritten(f"{job.megatron}.bin", error)) from None
    print(folder.name)  # of letters and digits, whereas a path may hold the end of a line


if __name__ == "__main__":
    sys.exit(run_job(DataJob, tokenise, sys.argv[1:]))
