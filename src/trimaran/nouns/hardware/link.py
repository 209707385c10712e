"""Link: one direction of the way between two devices or nodes."""

from __future__ import annotations

from pydantic import Field

from trimaran.nouns.noun import Noun


class Link(Noun):
    """One direction of one device's (or node's) link: gigabit/s and microseconds."""

    bandwidth_gbps: float = Field(gt=0, le=1e9)
    latency_us: float = Field(ge=0, le=1e9)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth in bytes a second."""
        return self.bandwidth_gbps * 1e9 / 8
