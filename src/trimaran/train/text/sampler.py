"""Sampler: which text the k-th sample shows. It depends on the seed and on k alone, never on the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimaran.nouns.noun import TrimaranError
from trimaran.train.text.blend import Blend
from trimaran.train.text.tokens import Tokens

# The cut between training and validation text is moved to the end of the document that it falls into, where that is
# at most so many tokens further.
_SEARCH_TOKENS = 1 << 24


@dataclass
class _Stream:
    """Windows of a text, in an order that is drawn again for every epoch."""

    begin: int
    windows: int
    seed: int
    part: int

    def __post_init__(self) -> None:
        self._epoch = -1
        self._order: NDArray[Any] = np.empty(0, dtype=np.uint32)

    def window_of(self, sample: int) -> int:
        """The window that the `sample`-th sample of this text shows."""
        epoch, position = divmod(sample, self.windows)
        if epoch != self._epoch:
            key = np.array([self.seed % 2**64, (self.part << 40) + epoch], np.uint64)
            # every rank holds it, and a text of 15 T tokens has a few 1e9 windows
            self._order = np.arange(self.windows, dtype=np.uint32 if self.windows <= 1 << 32 else np.uint64)
            np.random.Generator(np.random.Philox(key=key)).shuffle(self._order)
            self._epoch = epoch
        return int(self._order[position])


class Sampler:
    """Windows of `seq_len` tokens plus the next token, which is the first of the next window.

    An epoch of a text shows each of its windows exactly once. Where the data blends several texts, samples come from
    them in proportion to their weights. The last share `validation` of every text is held out; with `held_out` the
    samples show that part alone.
    """

    def __init__(
        self, tokens: Tokens, seq_len: int, seed: int, *, validation: float = 0.0, held_out: bool = False
    ) -> None:
        self._tokens, self._seq_len = tokens, seq_len
        self._streams = []
        for part, (first, last) in enumerate(tokens.parts):
            cut = _cut(tokens, first, last, validation)
            begin, end = (cut, last) if held_out else (first, cut)
            if end - begin <= seq_len:
                raise TrimaranError(_too_short(tokens, part, end - begin, seq_len, validation, held_out))
            self._streams.append(_Stream(begin, (end - begin - 1) // seq_len, seed, part))
        self._blend = Blend(tokens.index.weights) if len(self._streams) > 1 else None
        self.samples_per_epoch = sum(stream.windows for stream in self._streams)

    @property
    def end_of_document(self) -> int:
        """The token that ends every document."""
        return self._tokens.index.end_of_document

    def start_of(self, sample: int) -> int:
        """The first token of the `sample`-th sample of the run."""
        part, number = (0, sample) if self._blend is None else self._blend.place_of(sample)
        stream = self._streams[part]
        return stream.begin + stream.window_of(number) * self._seq_len

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples `first` .. `first + count - 1` of the run, (count, seq_len + 1)."""
        starts = (self.start_of(sample) for sample in range(first, first + count))
        return np.stack([self._tokens.read(start, self._seq_len + 1) for start in starts])


def _cut(tokens: Tokens, begin: int, end: int, validation: float) -> int:
    """Where the held-out text begins: after a document, so that no document is on both sides."""
    if not validation:
        return end
    cut = end - round((end - begin) * validation)
    following = tokens.read(cut, min(_SEARCH_TOKENS, end - cut))
    ends = np.flatnonzero(following == tokens.index.end_of_document)
    return cut + int(ends[0]) + 1 if len(ends) and cut + ends[0] + 1 < end else cut


def _too_short(tokens: Tokens, part: int, count: int, seq_len: int, validation: float, held_out: bool) -> str:
    text = f"text {part + 1} of the blend: " if len(tokens.parts) > 1 else ""
    ways = "give more text or lower seq_len"
    if held_out:
        ways = f"raise train.validation (it is {validation:g}), {ways}"
    of = " held out" if held_out else ""
    return f"data: {text}{count} tokens{of} are fewer than the {seq_len + 1} of one sample: {ways}"
