"""Device, Link and Cluster: the hardware, as a datasheet or a probe states it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from trimaran.nouns.faults import Faults
from trimaran.nouns.model import Model
from trimaran.nouns.noun import Noun, TrimaranError
from trimaran.nouns.precision import PRECISIONS, PrecisionName, ProbedRate, Rate
from trimaran.nouns.probed_model import PartName, PartTime, ProbedModel
from trimaran.nouns.shaped_network import ShapedNetwork


class MatmulRate(Noun):
    """One measured matrix product: M x K times K x N in `precision` ran at `tflops`."""

    precision: ProbedRate
    m: int = Field(gt=0)
    n: int = Field(gt=0)
    k: int = Field(gt=0)
    tflops: float = Field(gt=0)


class CollectiveTime(Noun):
    """One measured collective or send: `bytes` over `ranks` ranks took `time_us`."""

    op: Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
    ranks: int = Field(gt=1)
    bytes: int = Field(gt=0)
    time_us: float = Field(gt=0)


class AttentionTime(Noun):
    """One measured causal attention over `batch_heads` (batch x heads) sequences, in microseconds.

    The fused kernel that PyTorch chooses; `backward_us` is the backward alone.
    """

    precision: ProbedRate
    batch_heads: int = Field(gt=0)
    seq_len: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    forward_us: float = Field(gt=0)
    backward_us: float = Field(gt=0)


class Contention(Noun):
    """How much longer a slot takes when `ranks` slots of its node work at once than when it works alone.

    1 means that the slots do not feel each other. Slots that outnumber the cores are in it too:
    two cores that four ranks share show about 2. `matmul` is for matrix products, `memory` for
    passes over large tensors, `overhead` for small operators.
    """

    ranks: int = Field(gt=1)
    matmul: float = Field(gt=0)
    memory: float = Field(gt=0)
    overhead: float = Field(gt=0)


class Device(Noun):
    """One rank's worth of hardware: a GPU, or a slot of a CPU node with its cores.

    `peak_tflops` and `mem_bandwidth_gb_s` (1e9 bytes/s) are datasheet or, where a probe wrote
    them, measured ceilings. A precision that the device lacks is left out of `peak_tflops`.
    """

    name: str = ""
    kind: Literal["gpu", "cpu"]
    peak_tflops: dict[Rate, float]
    mem_gib: float = Field(gt=0, le=1e6)
    mem_bandwidth_gb_s: float = Field(gt=0, le=1e9)
    matmul_share: float = Field(
        default=0.0, ge=0, le=1, description="best 16-bit matmul rate measured over peak; 0: none"
    )
    narrow_share: float = Field(
        default=0.0, ge=0, le=1, description="best 8-bit matmul rate measured over its peak; 0: as `matmul_share`"
    )
    transposes_fp8: bool = Field(
        default=False, description="fp8 products take their operands in one order alone, so some are kept in both"
    )
    sustained_share: float = Field(
        default=0.95, gt=0, le=1, description="what hours of training keep up of that rate: power and clocks"
    )
    flash_share: float = Field(
        default=0.0, ge=0, le=1, description="rate of flash attention's kernels over peak, as published; 0: none"
    )
    cudnn_share: float = Field(
        default=0.0, ge=0, le=1, description="the same of cuDNN's flash attention; 0: as `flash_share`"
    )
    usual_stack: str = Field(default="", description="the stack that a plan assumes where nobody names one")
    context_gib: float = Field(default=0.0, ge=0, description="runtime context: CUDA, or the process itself")
    multiprocessors: int = Field(default=0, ge=0, description="SMs of a GPU, for wave quantization")
    host_link_gb_s: float = Field(
        default=0.0, ge=0, le=1e6, description="one direction of the link between device and host; 0: not stated"
    )
    host_mem_gb_s: float = Field(
        default=0.0, ge=0, le=1e6, description="bandwidth of the host's memory, a device's share of it; 0: not stated"
    )
    cores: int = Field(default=0, ge=0, description="CPU cores that one slot computes with")
    kubernetes_resource: str = Field(
        default="", description="as which a device plugin of Kubernetes counts it, as nvidia.com/gpu; empty: not stated"
    )
    # sky/utils/gpu_names.py of skypilot-org/skypilot, commit 7e595970a806
    skypilot_name: str = Field(default="", description="SkyPilot's name of it, as H100; empty: not stated")
    clock_ghz: float = Field(default=0.0, ge=0)
    op_overhead_us: float = Field(default=0.0, ge=0, description="measured cost of one small operator; 0: prior")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for precision, tflops in self.peak_tflops.items():
            if not 0 < tflops < 1e6:
                raise ValueError(f"peak_tflops.{precision} {tflops} is not between 0 and 1e6 TFLOP/s")
        if not self.peak_tflops:
            raise ValueError("peak_tflops is empty: state at least one precision")
        return self

    def attention_share(self, kernel: str) -> float:
        """The published rate of flash attention over peak, by whose kernel it is (Stack.flash_kernel); 0: none."""
        return (self.cudnn_share if kernel == "cudnn" else 0.0) or self.flash_share

    def attention_sustained(self, kernel: str) -> float:
        """What hours of training keep up of that rate.

        cuDNN's is published at a fixed clock below the highest (arXiv 2407.08608, section 4) and draws less power than
        the best product, so a power limit does not lower it: Qwen3 at 131,072 tokens, most of whose time is
        attention's, reaches it.
        """
        return 1.0 if kernel == "cudnn" and self.cudnn_share else self.sustained_share

    def peak(self, precision: PrecisionName) -> float | None:
        """Peak TFLOP/s of matrix products in `precision`, or None where the device has none.

        A CPU makes fp16 products in fp32 (trimaran.train.model.product).
        """
        if precision == "fp16" and self.kind == "cpu":
            return self.peak_tflops.get("fp16", self.peak_tflops.get("fp32"))
        return self.peak_tflops.get(PRECISIONS[precision].rate)


class Link(Noun):
    """One direction of one device's (or node's) link: gigabit/s and microseconds."""

    bandwidth_gbps: float = Field(gt=0, le=1e9)
    latency_us: float = Field(ge=0, le=1e9)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth in bytes a second."""
        return self.bandwidth_gbps * 1e9 / 8


class Cluster(Noun):
    """Nodes of devices on a fast link (per device), joined by a slow one (per node)."""

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

    @property
    def devices(self) -> int:
        """All devices of the cluster."""
        return self.nodes * self.devices_per_node

    @property
    def devices_per_machine(self) -> int:
        """Devices that share one machine's cores and memory: a node's, or all where the nodes are its namespaces."""
        return self.devices_per_node if self.shaped is None else self.devices

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
