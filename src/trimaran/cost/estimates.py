"""What the cost model answers: predicted memory and time, in named parts, of one layout or of a whole grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from trimaran.cost.grid import Bools, Floats, Ints
from trimaran.cost.memory.parts import MEMORY_PARTS
from trimaran.nouns.noun import Noun


@dataclass(frozen=True)
class Estimates:
    """Predictions for a grid of n layouts: arrays of shape (n,).

    The time parts by name, seconds exposed along the slowest stage, add up to `sec_per_it`; `mem_gib` is the
    largest over the ranks, `reported_mem_gib` what the stack's own tool would print.
    """

    parts: Mapping[str, Floats]
    sec_per_it: Floats
    mem_gib: Floats
    reported_mem_gib: Floats
    fits: Bools

    @classmethod
    def join(cls, several: Sequence[Self]) -> Self:
        """One from several, in order."""
        parts = {name: np.concatenate([each.parts[name] for each in several]) for name in several[0].parts}
        totals = {f.name: np.concatenate([getattr(each, f.name) for each in several]) for f in fields(cls)[1:]}
        return cls(parts, **totals)

    def take(self, index: Ints | slice) -> Self:
        """Those of the layouts at `index`."""
        totals = {f.name: getattr(self, f.name)[index] for f in fields(self)[1:]}
        return type(self)({name: seconds[index] for name, seconds in self.parts.items()}, **totals)


class TimeParts(Noun):
    """Seconds of one iteration by cause, exposed along the slowest stage; they add up to sec_per_it."""

    forward: float
    backward: float
    recompute: float
    head: float
    tp: float
    ep: float = 0.0
    cp: float = 0.0
    pp: float
    bubble: float
    dp: float
    optimizer: float
    offload: float = 0.0
    overhead: float


class MemoryParts(Noun):
    """GiB on a rank of one pipeline stage, by cause."""

    stage: int
    layers: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    context: float

    @property
    def total(self) -> float:
        """All of it, GiB."""
        return float(sum(getattr(self, name) for name in MEMORY_PARTS))


class Estimate(Noun):
    """What the cost model predicts for one layout.

    `calibrated_by` says whether a fit or the prior stands behind it; `time_error` and `mem_error` are the
    relative errors (1 sigma) that the calibration showed on rows it had not seen.
    """

    sec_per_it: float
    time: TimeParts
    mem_gib: float
    reported_mem_gib: float
    memory: tuple[MemoryParts, ...]
    fits: bool
    stage_split: tuple[int, ...]
    micro_batches: int
    calibrated_by: str
    time_error: float
    mem_error: float

    @property
    def between(self) -> tuple[float, float]:
        """Seconds per iteration between which two of three such runs lie (1 sigma, log-normal)."""
        return self.sec_per_it * math.exp(-self.time_error), self.sec_per_it * math.exp(self.time_error)
