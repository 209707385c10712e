"""Blend: which of several texts the k-th sample of a run comes from; it depends on k and the texts' weights alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Weights are rounded to multiples of 1 / BLOCK. After a block of samples the order of texts begins again.
BLOCK = 1 << 16


class Blend:
    """Spreads samples over texts evenly: after any number of samples each text has had its share, to a sample or so.

    Within a block the j-th of a text's n samples has the position (j + 1/2) / n, and samples come in the order of
    their positions.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = np.asarray(weights) / sum(weights) * BLOCK
        counts = np.maximum(1, np.floor(shares).astype(np.int64))
        # samples that rounding left over go to the largest remainders; a surplus is taken from the largest text
        while (missing := BLOCK - int(counts.sum())) > 0:
            counts[np.argsort(counts - shares, kind="stable")[:missing]] += 1
        counts[np.argmax(counts)] += BLOCK - int(counts.sum())
        self._counts = counts
        texts = np.repeat(np.arange(len(counts)), counts)
        numbers = np.concatenate([np.arange(n) for n in counts])
        order = np.argsort((numbers + 0.5) / counts[texts], kind="stable")
        self._texts, self._numbers = texts[order], numbers[order]

    def place_of(self, sample: int) -> tuple[int, int]:
        """The text of the `sample`-th sample, and how many samples of that text come before it."""
        block, within = divmod(sample, BLOCK)
        text = int(self._texts[within])
        return text, int(block * self._counts[text] + self._numbers[within])
