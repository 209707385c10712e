"""Compression: how replicas send each other fewer bytes of what they sum.

In a narrow format, in blocks of numbers with a scale each; or matrices as products of thin factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimaran.nouns.stack import Compression

# Numbers that share a scale: large enough that scales are 1 to 2% of what is sent, small enough that one number that
# stands out costs few others their digits.
BLOCK = 256
SCALE_BYTES = 4


@dataclass(frozen=True)
class Format:
    """A number over its block's scale: bytes of it, and the largest, at which the block's largest number lies."""

    bytes: int
    largest: float

    @property
    def sent_bytes(self) -> float:
        """Bytes that a number takes on its way, with its part of the block's scale."""
        return self.bytes + SCALE_BYTES / BLOCK


# fp16 has a scale too: gradients of a large batch are below its smallest number, and those of a bad step above its
# largest.
FORMATS: Mapping[Compression, Format] = {"fp16": Format(2, 1.0), "int8": Format(1, 127.0)}

Length = float | NDArray[np.floating[Any]]
# Columns of a factor (PowerSGD): Vogels et al., arXiv 1905.13727, tables 3 and 4, lose nothing with 4 of them.
LOW_RANK = 4


def in_factors(rows: Length, columns: Length) -> bool | NDArray[np.bool_]:
    """Whether a matrix is sent as factors: where they are less than half of it (PyTorch's min_compression_rate)."""
    return 2 * LOW_RANK * (rows + columns) < rows * columns
