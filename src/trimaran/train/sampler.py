"""Sampler: which text the k-th sample is. It depends on the seed and on k alone, never on the layout."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trimaran.noun import TrimaranError
from trimaran.train.tokens import Tokens


class Sampler:
    """Windows of `seq_len` tokens plus the next one, in an order drawn anew for every epoch.

    Windows do not overlap but for that one token, and an epoch shows each exactly once.
    """

    def __init__(self, tokens: Tokens, seq_len: int, seed: int) -> None:
        self._tokens, self._seq_len, self._seed = tokens, seq_len, seed
        self.samples_per_epoch = (len(tokens) - 1) // seq_len
        if self.samples_per_epoch < 1:
            raise TrimaranError(
                f"data: {len(tokens)} tokens are fewer than the {seq_len + 1} of one sample: "
                f"give more text or lower seq_len"
            )
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def window_of(self, sample: int) -> int:
        """The number of the window that the `sample`-th sample of the run shows."""
        epoch, position = divmod(sample, self.samples_per_epoch)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(key=np.array([self._seed % 2**64, epoch], np.uint64)))
            self._order = generator.permutation(self.samples_per_epoch)
            self._epoch = epoch
        return int(self._order[position])

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples `first` .. `first + count - 1` of the run, (count, seq_len + 1)."""
        windows = (self.window_of(sample) for sample in range(first, first + count))
        return np.stack([self._tokens.read(window * self._seq_len, self._seq_len + 1) for window in windows])
