"""Timeline: who does what when - events per rank and micro-batch, simulated or measured."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trimaran.nouns.noun import Noun

EventKind = Literal[
    "forward", "backward", "backward_input", "backward_weight", "recompute", "send", "receive", "wait", "reduce",
    "step",
]  # fmt: skip


class Event(Noun):
    """One interval on one rank. Times are seconds from the start of the iteration."""

    rank: int = Field(ge=0)
    kind: EventKind
    start_s: float
    end_s: float
    micro_batch: int | None = None
    stage: int | None = Field(default=None, description="virtual stage in pipeline order")


class Timeline(Noun):
    """The events of one iteration, over all ranks that are shown."""

    events: tuple[Event, ...]
    origin: Literal["simulated", "measured"]

    @property
    def duration_s(self) -> float:
        """End of the last event."""
        return max((event.end_s for event in self.events), default=0.0)
