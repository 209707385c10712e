"""NodeGroup and GroupLink: nodes that are alike, and the ways between groups of them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import permutations
from math import gcd
from typing import Any, Self

from pydantic import Field, model_validator

from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.noun import Noun


class NodeGroup(Noun):
    """`nodes` nodes of one kind that stand together: `inter` joins any two of them, `intra` the devices of one."""

    name: str = Field(min_length=1, description="tells the groups of a cluster apart")
    region: str = Field(default="", description="where the nodes stand; empty: the group's name")
    device: Device
    nodes: int = Field(gt=0, le=1_000_000)
    devices_per_node: int = Field(gt=0, le=1024)
    intra: Link = Field(description="per device, inside a node")
    inter: Link = Field(description="per node, shared by its devices: to the other nodes of the group")
    host_mem_gib: float = Field(default=0.0, ge=0, description="memory of a host; 0: not stated")
    price_per_device_hour: float | None = Field(default=None, ge=0)
    spot_price_per_device_hour: float | None = Field(default=None, ge=0)

    @property
    def devices(self) -> int:
        """All devices of the group."""
        return self.nodes * self.devices_per_node


class GroupLink(Link):
    """The way between nodes of two groups, both ways unless it is `one_way`, from the first to the second.

    Every two nodes have such a way of their own, or all of them share one where it is `shared`.
    """

    between: tuple[str, str] = Field(description="names of the two groups")
    one_way: bool = Field(default=False, description="the way back is another")
    shared: bool = Field(default=False, description="all nodes of the two groups share it, as a line between two sites")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.between[0] == self.between[1]:
            raise ValueError(f"between {self.between[0]!r} and itself is the group's own inter: name two groups")
        return self

    @property
    def ways(self) -> tuple[tuple[str, str], ...]:
        """From which group to which it leads."""
        there, back = self.between, (self.between[1], self.between[0])
        return (there,) if self.one_way else (there, back)


def ways_between(groups: Sequence[NodeGroup], links: Sequence[GroupLink]) -> dict[tuple[str, str], GroupLink]:
    """The link from each group to each other one, by their names.

    Raises ValueError, in one line that names it, where one is missing, stated twice, leads one way alone or names a
    group that is none.
    """
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"groups have the name {name!r} {names.count(name)} times: give each its own")
    ways: dict[tuple[str, str], GroupLink] = {}
    for link in links:
        for name in link.between:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"the groups are {', '.join(names)}"
                raise ValueError(f"links between {' and '.join(link.between)}: {name!r} is no group, {hint}")
        for way in link.ways:
            if way in ways:
                raise ValueError(f"links from {way[0]} to {way[1]} are stated twice: leave one out, or make it one_way")
            ways[way] = link
    for source, target in permutations(names, 2):
        if (source, target) in ways:
            continue
        if (target, source) in ways:
            raise ValueError(
                f"links from {target} to {source} are one_way, and none leads back: state one from {source} to {target}"
            )
        raise ValueError(f"links between {source} and {target} are missing: state their bandwidth_gbps and latency_us")
    return ways


def as_one(groups: Sequence[NodeGroup], links: Sequence[GroupLink]) -> dict[str, Any]:
    """Fields of a cluster of alike nodes that is nowhere better than the groups: the slowest of all stands for each.

    What knows of one kind of node alone may take the cluster for it and is then never too fast.
    """
    devices = [group.device for group in groups]
    slowest = min(devices, key=lambda device: max(device.peak_tflops.values()))
    per_node = gcd(*(group.devices_per_node for group in groups))
    prices = [group.price_per_device_hour for group in groups]
    spot_prices = [group.spot_price_per_device_hour for group in groups]
    return {
        "device": slowest.model_copy(update={"mem_gib": min(device.mem_gib for device in devices)}),
        "nodes": sum(group.devices for group in groups) // per_node,
        "devices_per_node": per_node,
        "intra": slowest_of([group.intra for group in groups]),
        "inter": slowest_of([*(shared_out(group.inter, group.devices_per_node, per_node) for group in groups), *links]),
        "host_mem_gib": min(group.host_mem_gib * per_node / group.devices_per_node for group in groups),
        "price_per_device_hour": _mean_price(groups, prices),
        "spot_price_per_device_hour": _mean_price(groups, spot_prices),
    }


def shared_out(link: Link, devices: int, some: int) -> Link:
    """The part of a node's link that some of its devices have."""
    share = some / devices
    return Link(bandwidth_gbps=link.bandwidth_gbps * share, latency_us=link.latency_us)


def slowest_of(links: Sequence[Link]) -> Link:
    """The smallest bandwidth and the largest delay of several links."""
    return Link(
        bandwidth_gbps=min(link.bandwidth_gbps for link in links), latency_us=max(link.latency_us for link in links)
    )


def _mean_price(groups: Sequence[NodeGroup], prices: Sequence[float | None]) -> float | None:
    """The price of a device, on average over all; None where a group states none."""
    known = [price for price in prices if price is not None]
    if len(known) < len(prices):
        return None
    devices = [group.devices for group in groups]
    return sum(price * count for price, count in zip(known, devices, strict=True)) / sum(devices)
