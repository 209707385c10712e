"""Compression: the formats in which replicas send each other what they sum, blocks of numbers with a scale each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
