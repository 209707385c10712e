"""PipelineRuns: many pipelines to play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trimaran.cost.grid import Floats, Ints
from trimaran.nouns.stack import Schedule

# What the stack says of all pipelines alike, here and in StageTimes: no arrays.
OF_STACK = ("blocks", "eager")


@dataclass(frozen=True)
class PipelineRuns:
    """n pipelines to play, one schedule for all of them or several; arrays over runs first.

    `forward_s`, `backward_s` and `weight_s` have shape (n, chunks, ranks), 0 where a run has fewer: seconds of the
    virtual stage `chunk * ranks + rank`, folded 2 ranks - 1 - rank for the second chunk, the backward with its weight
    gradients. A send between a rank and the next (the last one's next is the first) holds their link for `held_s` and
    arrives after `arrives_s`, shape (n, ranks); the two directions do not meet. Under the schedules of `blocks` the
    sender waits until it arrives. `eager`: 1F1B goes ahead by twice as many forwards (`schedule.actions`).
    """

    schedule: Ints
    ranks: Ints
    chunks: Ints
    micro_batches: Ints
    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    held_s: Floats
    arrives_s: Floats
    blocks: tuple[Schedule, ...]
    eager: bool

    @classmethod
    def joined(cls, runs: Sequence[Self]) -> Self:
        """Several runs of one layout as one."""
        columns: dict[str, Any] = {
            each.name: np.concatenate([getattr(run, each.name) for run in runs])
            for each in fields(cls)
            if each.name not in OF_STACK
        }
        return cls(**columns, blocks=runs[0].blocks, eager=runs[0].eager)

    def take(self, index: NDArray[Any]) -> Self:
        """The runs at `index`, their padding cut to what they need."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        chunks, ranks = int(self.chunks[index].max(initial=1)), int(self.ranks[index].max(initial=1))
        for name, value in columns.items():
            if name in ("forward_s", "backward_s", "weight_s"):
                columns[name] = value[index, :chunks, :ranks]
            elif name in ("held_s", "arrives_s"):
                columns[name] = value[index, :ranks]
            elif name not in OF_STACK:
                columns[name] = value[index]
        return type(self)(**columns)
