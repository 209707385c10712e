"""ShapedNetwork: the network that a trial is to run on, made of delay and rate rather than of cables."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from trimaran.nouns.noun import Noun

_PLAIN_NAME = re.compile(r"\w[\w.+ -]{0,59}")


class ShapedPair(Noun):
    """The way between two nodes, in both directions, where it differs from the rest."""

    nodes: tuple[int, int] = Field(description="numbers of the two nodes, from 0")
    latency_ms: float = Field(ge=0, le=10_000, description="delay, one way")
    bandwidth_gbps: float = Field(gt=0, le=100, description="gigabit/s, each way")

    @model_validator(mode="after")
    def _check(self) -> Self:
        first, second = self.nodes
        if first < 0 or second < 0 or first == second:
            raise ValueError(f"nodes {first} and {second} are no pair: give two different numbers from 0")
        return self


class ShapedNode(Noun):
    """A node whose ranks compute more slowly than those of others."""

    node: int = Field(ge=0, description="its number, from 0")
    cpu_share: float = Field(
        ge=0.05, le=1, description="part of each of its cores' time that a rank gets at most, and so of its speed"
    )


class ShapedNetwork(Noun):
    """Nodes of `ranks_per_node` ranks on a switch: a port of `bandwidth_gbps` each way, `latency_ms` between any two.

    What one machine cannot carry is scaled down: with `scale` 64 the ports run at a 64th of `bandwidth_gbps`, and
    the model is to be chosen so that it sends a 64th of the bytes. Delays stay as they are, and so do times.
    """

    name: str = Field(description="tells the rows of one network from another's")
    latency_ms: float = Field(ge=0, le=10_000, description="delay between two nodes, one way")
    bandwidth_gbps: float = Field(gt=0, le=100, description="gigabit/s of each node's port, each way")
    scale: float = Field(default=1.0, ge=1, le=1e6, description="the ports' rate, and the payload, are divided by it")
    ranks_per_node: int = Field(default=1, gt=0, le=1024)
    pairs: tuple[ShapedPair, ...] = Field(default=(), description="ways that differ, in the same scale")
    nodes: tuple[ShapedNode, ...] = Field(default=(), description="nodes that compute more slowly; the others do not")

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not _PLAIN_NAME.fullmatch(name):
            raise ValueError("a row's variant holds this name: use letters, digits, spaces and . _ + -, at most 60")
        return name

    @model_validator(mode="after")
    def _check(self) -> Self:
        numbers = [stated.node for stated in self.nodes]
        if twice := [number for number in numbers if numbers.count(number) > 1]:
            raise ValueError(f"nodes states node {twice[0]} {numbers.count(twice[0])} times: give it one cpu_share")
        return self

    @property
    def port_gbps(self) -> float:
        """Rate of a port as it is shaped."""
        return self.bandwidth_gbps / self.scale

    def delay_ms(self, source: int, target: int) -> float:
        """Delay from one node to another."""
        pair = self._pair(source, target)
        return self.latency_ms if pair is None else pair.latency_ms

    def rate_gbps(self, source: int, target: int) -> float:
        """Rate that a lone stream from one node to another should reach, as it is shaped."""
        pair = self._pair(source, target)
        return self.port_gbps if pair is None else min(self.port_gbps, pair.bandwidth_gbps / self.scale)

    def speed(self, node: int) -> float:
        """Speed of a node's ranks, as a share of what they would compute at by themselves."""
        return next((stated.cpu_share for stated in self.nodes if stated.node == node), 1.0)

    @property
    def slowest(self) -> tuple[float, float]:
        """The largest delay (ms) and the smallest rate (gigabit/s, as shaped) between any two nodes."""
        return (
            max((self.latency_ms, *(pair.latency_ms for pair in self.pairs))),
            min((self.port_gbps, *(pair.bandwidth_gbps / self.scale for pair in self.pairs))),
        )

    def _pair(self, source: int, target: int) -> ShapedPair | None:
        return next((pair for pair in self.pairs if {*pair.nodes} == {source, target}), None)
