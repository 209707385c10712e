"""Tokenizers: bytes as they are, a BPE trained on the recipe's text, or a given `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from trimaran.files.catalogue import write_atomically
from trimaran.files.user_file import MIB, regular_file
from trimaran.nouns.noun import TrimaranError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

END_OF_DOCUMENT = "<|endoftext|>"
DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
# Gemma's <eos> stands before </s>, which its tokenizers have besides, for HTML: github.com/ggml-org/llama.cpp, pull
# request 21492.
END_MARKERS = (END_OF_DOCUMENT, "<eos>", "</s>", "<|end_of_text|>", DEEPSEEK_END, "[SEP]")

# A BPE learns its merges from at most so many characters; more change the merges little.
TRAINING_CHARACTERS = 16_000_000
SMALLEST_BPE = 257
# The largest of published models have 33 MiB; one that is read and written again may grow by a part.
TOKENIZER_BYTES = 256 * MIB


class Tokenizer(Protocol):
    """Text to tokens. `vocab` is 1 more than the largest token."""

    vocab: int
    end_of_document: int

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Tokens of each document."""
        ...

    def save(self, path: Path) -> None:
        """Write it as a `tokenizer.json`. Raises TrimaranError where the file cannot be written."""
        ...


class Bytes:
    """UTF-8 bytes 0 to 255, and 256 between documents."""

    vocab = 257
    end_of_document = 256

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Bytes of each document."""
        return [np.frombuffer(d.encode(errors="replace"), dtype=np.uint8).astype(np.uint32) for d in documents]

    def save(self, path: Path) -> None:
        """Write it as a BPE without merges, whose tokens are bytes."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        inner = Tokenizer(models.BPE(vocab=dict(zip(_byte_characters(), range(256), strict=True)), merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True)])
        write_atomically(path, inner.to_str(pretty=True))


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself if printable, else one from 256 on."""
    prints = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]


class HuggingFace:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, inner: HuggingFaceTokenizer, name: str) -> None:
        self.inner = inner
        ids = inner.get_vocab(with_added_tokens=True)
        self.vocab = max(ids.values(), default=-1) + 1
        end = next((ids[marker] for marker in END_MARKERS if marker in ids), None)
        if end is None:
            raise TrimaranError(
                f"data.tokenizer: {name} has no end-of-document token (one of {', '.join(END_MARKERS)}): add one"
            )
        self.end_of_document = end
        self.end_name = str(inner.id_to_token(end))

    def encode(self, documents: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Tokens of each document, without any that the tokenizer would add around them."""
        encoded = self.inner.encode_batch_fast(list(documents), add_special_tokens=False)
        return [np.array(e.ids, dtype=np.uint32) for e in encoded]

    def save(self, path: Path) -> None:
        """Write it as it is."""
        write_atomically(path, self.inner.to_str())  # a line for each half of a merge would make it far larger


def train_bpe(texts: Sequence[Iterable[str]], vocab: int) -> HuggingFace:
    """A byte-level BPE (as GPT-2's) of `vocab` tokens, or of fewer where there is little text.

    Raises TrimaranError where `vocab` is below SMALLEST_BPE.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < SMALLEST_BPE:
        raise TrimaranError(
            f"data.tokenizer: a BPE needs a vocabulary of {SMALLEST_BPE} at least, model.vocab is {vocab}: raise it"
        )
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    share = TRAINING_CHARACTERS // len(texts)
    inner.train_from_iterator(chain.from_iterable(_up_to(text, share) for text in texts), trainer=trainer)
    return HuggingFace(inner, "bpe")


def load_tokenizer(path: Path) -> HuggingFace:
    """The tokenizer of a `tokenizer.json`, which gives all tokens of a document and no others.

    A file may ask for documents cut or filled up to one length, as it was saved for another use. Raises TrimaranError
    where the file is not a tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        inner = Tokenizer.from_file(str(regular_file(path, "it", TOKENIZER_BYTES)))
    except Exception as error:  # the library raises bare Exception
        raise TrimaranError(
            f"data.tokenizer: {path} is neither 'bytes', 'bpe' nor a readable tokenizer.json ({error})"
        ) from None
    inner.no_truncation()
    inner.no_padding()
    return HuggingFace(inner, str(path))


def _up_to(documents: Iterable[str], characters: int) -> Iterator[str]:
    for document in documents:
        yield document[:characters]
        characters -= len(document)
        if characters <= 0:
            return


def batches(documents: Iterable[str], size: int) -> Iterator[list[str]]:
    """Documents, `size` at a time."""
    iterator = iter(documents)
    while batch := list(islice(iterator, size)):
        yield batch
