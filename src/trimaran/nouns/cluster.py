"""Cluster: the hardware, as a datasheet or a probe states it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from trimaran.nouns.faults import Faults
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.hardware.measured import AttentionTime, CollectiveTime, Contention, MatmulRate
from trimaran.nouns.hardware.node_group import GroupLink, NodeGroup, as_one, shared_out, ways_between
from trimaran.nouns.model import Model
from trimaran.nouns.noun import Noun, TrimaranError
from trimaran.nouns.probed_model import PartName, PartTime, ProbedModel
from trimaran.nouns.shaped_network import ShapedNetwork


class Cluster(Noun):
    """Nodes of devices on a fast link (per device), joined by a slow one (per node).

    Nodes that differ, or whose links do, are `groups` of alike ones with `links` between them; the other fields are
    then those of `of_groups`, by which the cluster is nowhere better than it is.
    """

    name: str = ""
    device: Device
    nodes: int = Field(gt=0, le=10_000_000)
    devices_per_node: int = Field(gt=0, le=1024)
    devices_per_host: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="devices of one host where a node, on one fast link, is several; 0: is one",
    )
    intra: Link = Field(description="per device, inside a node")
    inter: Link = Field(description="per node, shared by its devices")
    cards_per_node: int = Field(
        default=0,
        ge=0,
        description="network cards of a node, spread over its devices; 0: all devices share what there is",
    )
    cores_per_node: int = Field(default=0, ge=0, description="CPU nodes: real cores; slots may want more")
    host_mem_gib: float = Field(
        default=0.0,
        ge=0,
        description="memory of a host: all slots of a CPU node share it, beside accelerators it is what offload has; "
        "0: not stated",
    )
    all_reduce_gb_s: float = Field(
        default=0.0, ge=0, le=1e9, description="measured bus bandwidth of large all-reduces across nodes; 0: not known"
    )
    price_per_device_hour: float | None = Field(default=None, ge=0)
    spot_price_per_device_hour: float | None = Field(default=None, ge=0)
    faults: Faults | None = Field(default=None, description="how often its devices fail; None: not stated")
    source: str = Field(default="", description="where the figures come from")
    matmul: tuple[MatmulRate, ...] = Field(default=(), description="measured by probe")
    collectives: tuple[CollectiveTime, ...] = Field(default=(), description="measured by probe")
    attention: tuple[AttentionTime, ...] = Field(default=(), description="measured by probe")
    contention: tuple[Contention, ...] = Field(
        default=(), description="measured by probe; empty: ranks take turns on the cores"
    )
    models: tuple[ProbedModel, ...] = Field(default=(), description="layers and heads, measured by probe --model")
    shaped: ShapedNetwork | None = Field(default=None, description="the nodes are namespaces of one machine, joined so")
    groups: tuple[NodeGroup, ...] = Field(default=(), description="nodes that are alike; empty: all are")
    links: tuple[GroupLink, ...] = Field(default=(), description="ways between the groups, one for each two of them")

    @classmethod
    def of_groups(cls, groups: Sequence[NodeGroup], links: Sequence[GroupLink], **others: Any) -> Self:
        """The cluster of nodes that differ; raises pydantic's ValidationError where a link is missing or wrong."""
        return cls(**{**others, "groups": tuple(groups), "links": tuple(links), **as_one(groups, links)})

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if not self.groups:
            if self.links:
                raise ValueError("links are between groups of nodes, and the cluster has none: state groups, or inter")
            return self
        ways_between(self.groups, self.links)
        devices = sum(group.devices for group in self.groups)
        if devices != self.devices:
            raise ValueError(
                f"nodes x devices_per_node = {self.devices} devices, and the groups have {devices}: leave out what the "
                f"groups state"
            )
        return self

    @property
    def devices(self) -> int:
        """All devices of the cluster."""
        return self.nodes * self.devices_per_node

    @property
    def devices_replaced(self) -> int:
        """Devices that go and come together where one of them fails: those of a host, which may be a part of a node."""
        return self.devices_per_host or self.devices_per_node

    @property
    def devices_per_machine(self) -> int:
        """Devices that share one machine's cores and memory: a node's, or all where the nodes are its namespaces."""
        return self.devices_per_node if self.shaped is None else self.devices

    def of_a_job(self, devices: int) -> Cluster:
        """The cluster as a job of so many devices has it: of racks of several hosts each, as many hosts of every rack.

        Schedulers give out blocks of hosts that share a fast link (Slurm, topology/block and sbatch --segment), so that
        groups of ranks fill them evenly: 256 devices are 64 in each of 4 racks of 72, not 72, 72, 72 and 40. Racks stay
        whole where no part of more than half of one does that, or where there are too few of them.
        """
        rack, host = self.devices_per_node, self.devices_per_host
        if not host or self.groups or devices <= rack:
            return self
        parts = range(rack - rack % host, rack // 2, -host)
        even = (part for part in parts if devices % part == 0 and devices // part <= self.nodes)
        part = next(even, rack)
        share = {
            "devices_per_node": part,
            "inter": shared_out(self.inter, rack, part),
            "cards_per_node": self.cards_per_node * part // rack,
            "all_reduce_gb_s": self.all_reduce_gb_s * part / rack,
        }
        return self.model_copy(update=share)

    @property
    def of_hosts(self) -> Cluster:
        """The cluster with each host as a node, as whoever starts ranks counts them: Slurm, Ray, a training's restarts.

        It is the same cluster where a node is one host, and no cluster to predict on where a rack is several.
        """
        if not self.devices_per_host:
            return self
        hosts = {
            "nodes": self.nodes * (self.devices_per_node // self.devices_per_host),
            "devices_per_node": self.devices_per_host,
            "devices_per_host": 0,
        }
        return self.model_copy(update=hosts)

    @property
    def core_share(self) -> float:
        """Share of a node's cores that a slot wants; 0 where the node's number of cores is not stated."""
        return self.device.cores / self.cores_per_node if self.cores_per_node else 0.0

    def part_times(self, part: PartName, model: Model, stack: str) -> tuple[PartTime, ...]:
        """What a probe measured of a part of `model` in the software `stack`; empty where it measured none."""
        return tuple(time for probed in self.models if probed.stack == stack for time in probed.of(part, model))

    def on(self, network: ShapedNetwork) -> Cluster:
        """This machine's devices as nodes of their own, joined by a shaped network.

        A way between two nodes that is slower than the rest paces the others in a pipeline and in a ring, so the
        slowest stands for all. Raises TrimaranError where the machine has too few devices or is no CPU machine.
        """
        if self.device.kind != "cpu":
            raise TrimaranError(
                f"network {network.name!r} is for ranks that speak through sockets: device.kind is "
                f"{self.device.kind!r}, whose ranks on one machine go around it; use a CPU cluster"
            )
        if self.nodes > 1:
            raise TrimaranError(
                f"network {network.name!r} is shaped inside one machine, but the cluster has {self.nodes} nodes: "
                f"use a cluster of one"
            )
        if network.ranks_per_node > self.devices:
            raise TrimaranError(
                f"network {network.name!r} puts {network.ranks_per_node} ranks on a node, but the machine has "
                f"{self.devices} devices: lower ranks_per_node"
            )
        nodes = self.devices // network.ranks_per_node
        for pair in network.pairs:
            if max(pair.nodes) >= nodes:
                raise TrimaranError(
                    f"network {network.name!r} states a pair of node {max(pair.nodes)}, but the machine has {nodes} "
                    f"nodes of {network.ranks_per_node} ranks: 0 to {nodes - 1}; correct pairs or ranks_per_node"
                )
        delay_ms, gbps = network.slowest
        return self.model_copy(
            update={
                "nodes": nodes,
                "devices_per_node": network.ranks_per_node,
                "inter": Link(bandwidth_gbps=gbps, latency_us=delay_ms * 1e3),
                "shaped": network,
            }
        )
