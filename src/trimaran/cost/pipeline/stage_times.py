"""StageTimes: what the stages of a pipeline take for one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from trimaran.cost.grid import Floats, Ints
from trimaran.cost.pipeline.runs import OF_STACK
from trimaran.nouns.stack import Schedule


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch: of one layer on any stage, and what the first and the last stage do besides.

    Arrays over layouts. Forward and backward (recomputation included) hold everything a rank is busy with, TP
    collectives too; `weight` is the part of a layer's backward that zero-bubble puts off. A send holds its link for
    `send_held` and arrives after `send_arrives`; under the schedules of `blocks` ranks wait while they send, as in
    Megatron-LM's synchronous exchanges. `eager`: 1F1B goes ahead by twice as many forwards (`schedule.actions`).
    `crowding` says how many times longer everything but sends takes because other stages work at once on the same
    cores; 1 where each stage has its own.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    first_forward: Floats
    first_backward: Floats
    last_forward: Floats
    last_backward: Floats
    send_held: Floats
    send_arrives: Floats
    blocks: tuple[Schedule, ...]
    eager: bool
    crowding: Floats

    def take(self, rows: Ints) -> StageTimes:
        """Those of the layouts at `rows`."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return StageTimes(**{name: value if name in OF_STACK else value[rows] for name, value in columns.items()})

    def silent_from(self, row: int) -> StageTimes:
        """The same, from the layout `row` on over links that take no time."""
        sends = np.arange(len(self.forward)) < row
        held, arrives = (np.where(sends, seconds, 0.0) for seconds in (self.send_held, self.send_arrives))
        return replace(self, send_held=held, send_arrives=arrives)

    def scaled(self, share: Floats) -> StageTimes:
        """All but `crowding` times a share, shape (n,)."""
        seconds = [f.name for f in fields(self) if f.name not in (*OF_STACK, "crowding")]
        return replace(self, **{name: getattr(self, name) * share for name in seconds})

    def alone(self) -> StageTimes:
        """Times of a stage that has its cores to itself, as it has while the others wait; `crowding` is kept."""
        if np.all(self.crowding <= 1.0):
            return self
        apart = ("send_held", "send_arrives", *OF_STACK, "crowding")
        crowded = [f.name for f in fields(self) if f.name not in apart]
        times = {name: getattr(self, name) / self.crowding for name in crowded}
        return replace(self, **times)
