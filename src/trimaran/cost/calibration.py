"""Calibration: the efficiencies that are fitted, each with a prior that stands without a measured row."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from trimaran.cost.likeness import Similar
from trimaran.files.catalogue import CATALOG, dump_toml, load_cluster, load_stack, validate
from trimaran.files.user_file import read_toml
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import Noun
from trimaran.nouns.stack import Stack

SLOW_LINK_GBPS = 50.0
# Efficiencies that come with the software. Matrix products are the device's, but where a stack gathers weights beside
# them; links and hosts are the machine's, and `attention_pow2` is a quirk of one version of cuBLAS.
KERNELS = ("attention", "memory")
# How much longer products take while collectives run beside them and share the device's processors, memory and power:
# the mean over GPT and Llama models under FSDP, whose gathers and sums those are, on A100, H100, MI210 and MI250 (Lee
# et al., arXiv 2507.03114, abstract).
SLOWED_BY_TRAFFIC = 1.189


class Calibration(Noun):
    """Efficiencies of one cluster and one stack. The defaults are the priors for a GPU.

    Efficiencies are shares of a datasheet (or measured) ceiling; times are in the unit of
    their name. `time_error` and `mem_error` are the held-out relative errors (1 sigma), from which intervals
    are made.
    """

    cluster: str = ""
    stack: str = ""
    origin: str = Field(
        default="prior", description="where it comes from: the prior, a fit, or the tables behind a shipped one"
    )
    rows: int = Field(default=0, ge=0, description="measured rows behind it")
    time_error: float = Field(default=0.20, ge=0)
    mem_error: float = Field(default=0.08, ge=0)

    gemm: float = Field(default=0.85, gt=0, description="best matmul rate over peak, before quantization")
    gemm_plain: float = Field(default=0.90, gt=0, description="the same without tensor cores: fp32 on a GPU")
    attention: float = Field(default=0.60, gt=0, description="batched attention products, over `gemm`")
    attention_pow2: float = Field(default=0.30, gt=0, description="the same in fp16 where head size is a power of two")
    unaligned: float = Field(default=0.06, gt=0, description="16-bit products whose sizes are no multiple of 8")
    memory: float = Field(default=0.75, gt=0, description="memory-bound kernels over memory bandwidth")
    op_us: float = Field(default=26.0, gt=0, description="host time of one operator")
    random_cycles: float = Field(default=4.0, gt=0, description="CPU: drawing one element of a dropout, in one thread")
    fresh_gb_s: float = Field(default=20.0, gt=0, description="CPU: filling fresh pages where freed memory is not kept")
    intra_bandwidth: float = Field(default=0.70, gt=0, description="collectives inside a node over their ceiling")
    inter_bandwidth: float = Field(default=0.70, gt=0, description="collectives across nodes over the nodes' link")
    send_bandwidth: float = Field(default=0.50, gt=0, description="sends between stages over the link")
    send_delays: float = Field(default=0.75, gt=0, description="delays that a send holds a link beyond its bytes")
    collective_us: float = Field(default=100.0, gt=0, description="start of one collective")
    dp_overlap: float = Field(default=0.0, ge=0, le=1, description="share of gradient traffic hidden")
    micro_batch_ms: float = Field(default=1.5, ge=0, description="per micro-batch and stage, besides kernels")
    iteration_ms: float = Field(default=20.0, ge=0, description="per iteration: data, logging, scaler")
    time_scale: float = Field(default=1.0, gt=0, description="the machine's state on the day")

    activation_scale: float = Field(default=1.05, gt=0, description="allocator fragmentation")
    buffer_gib: float = Field(default=1.0, ge=0, description="communicators, workspaces, caches")
    memory_scale: float = Field(default=1.0, gt=0, description="what the software holds over what is counted")
    days: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="time on a day over `time_scale`, where the machine changed between days"
    )
    similar: tuple[Similar, ...] = Field(
        default=(), description="measured runs, and what they add to the time and memory of runs that resemble them"
    )

    def on_day(self, day: str | None) -> Calibration:
        """This calibration as the machine was on that day, where rows of the day were fitted to."""
        scale = self.days.get(day or "")
        return self if scale is None else self.model_copy(update={"time_scale": self.time_scale * scale, "days": {}})


def prior(cluster: Cluster, stack: Stack) -> Calibration:
    """What is believed of a cluster and a stack before any of their rows was measured."""
    stated: dict[str, float] = {"dp_overlap": stack.overlap_dp, "op_us": stack.op_us}
    if stack.fragmentation:
        stated["activation_scale"] = 1.0
    if cluster.device.matmul_share:
        stated["gemm"] = cluster.device.sustained_share * cluster.device.matmul_share
        flash_share = cluster.device.attention_share(stack.flash_kernel)
        if stack.flash_attention and flash_share:
            kept_up = cluster.device.attention_sustained(stack.flash_kernel)
            stated["attention"] = flash_share * kept_up / stated["gemm"]
    if stack.gathers_beside_products and cluster.device.kind == "gpu":
        stated["gemm"] = stated.get("gemm", Calibration().gemm) / SLOWED_BY_TRAFFIC
    if cluster.collectives:
        stated["intra_bandwidth"] = 1.0
    if cluster.device.kind == "gpu":
        # A slow link is itself the bottleneck, not the hosts behind it; a faster one carries no less than such a link.
        slow = 0.9 * min(1.0, SLOW_LINK_GBPS / cluster.inter.bandwidth_gbps)
        plain = Calibration()
        stated["inter_bandwidth"] = max(plain.inter_bandwidth, slow)
        stated["send_bandwidth"] = max(plain.send_bandwidth, slow)
    if cluster.all_reduce_gb_s:
        stated["inter_bandwidth"] = min(1.0, cluster.all_reduce_gb_s * 1e9 / cluster.inter.bytes_per_s)
    if cluster.device.kind == "cpu":
        # The probe times a bare operator; modules, autograd and Python come on top of it in training.
        stated.update(attention=0.5, memory=0.5, op_us=8.0 * cluster.device.op_overhead_us or 10.0)
        stated.update(collective_us=100.0, iteration_ms=2.0, micro_batch_ms=0.2)
        # Beside a node's processes its system is counted; a probed context holds all that a process has but what
        # the products' libraries keep packed and the holes of its heap (benchmarks/results/memory.md).
        stated["buffer_gib"] = 0.06 if cluster.device.context_gib else 2.0
        if not cluster.matmul:
            # A datasheet's peak is far above what CPU libraries reach.
            stated.update(gemm=0.6, intra_bandwidth=0.7, inter_bandwidth=0.7, send_bandwidth=0.7)
        else:
            stated.update(gemm=1.0)
    return Calibration(cluster=cluster.name, stack=stack.name).model_copy(update=stated)


def on_nodes(known: Calibration, of: Cluster, nodes: Cluster, stack: Stack) -> Calibration:
    """What is known of a cluster, on `nodes` of other GPUs: kernels as far above or below what is believed of each."""
    if {of.device.kind, nodes.device.kind} != {"gpu"}:
        return known
    here, there = prior(of, stack), prior(nodes, stack)
    ratios = {kernel: getattr(there, kernel) / getattr(here, kernel) for kernel in ("gemm", "attention")}
    moved = {kernel: getattr(known, kernel) * ratio for kernel, ratio in ratios.items() if ratio != 1.0}
    return known.model_copy(update=moved) if moved else known


@cache
def shipped(cluster: str, stack: str) -> Calibration | None:
    """The calibration that Trimaran ships for a catalogue cluster and stack, if there is one."""
    entry = CATALOG / "calibrations" / f"{cluster}.{stack}.toml"
    if not (cluster and stack and entry.is_file()):
        return None
    source = f"calibration {entry.name}"
    return validate(Calibration, read_toml(entry, source), source)


def learned_elsewhere(cluster: Cluster, stack: Stack, without: tuple[str, ...] = ()) -> Calibration:
    """The prior, with the kernels as far above or below it as the same stack's were on other clusters.

    Those are the shipped calibrations of devices of the same kind, but for the clusters named in `without`. What was
    learned of attention is its kernel's, and stays with the stacks that run the same one.
    benchmarks/fidelity.py says what this is worth on clusters held out.
    """
    base = prior(cluster, stack)
    elsewhere = _kernels_elsewhere(stack, cluster.device.kind, (cluster.name, *without))
    moved = {}
    for kernel in ("gemm", *KERNELS):
        ratios = [ratio[kernel] for ratio in elsewhere.values() if kernel in ratio]
        if ratios:
            moved[kernel] = getattr(base, kernel) * float(np.exp(np.mean(np.log(ratios))))
    if not moved:
        return base
    return base.model_copy(update={**moved, "origin": f"prior, kernels as on {', '.join(elsewhere)}"})


@cache
def _kernels_elsewhere(stack: Stack, kind: str, without: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """By what factor the kernels on each other cluster that is calibrated for the stack differ from the prior."""
    measured, elsewhere = stack.kernels_like or stack.name, dict[str, dict[str, float]]()
    for entry in sorted(entry.name for entry in (CATALOG / "calibrations").iterdir()):
        name = entry.removesuffix(f".{measured}.toml")
        known = None if name == entry or name in without else shipped(name, measured)
        cluster = load_cluster(name) if known else None
        if known is None or cluster is None or cluster.device.kind != kind:
            continue
        believed = prior(cluster, stack)
        kernels: tuple[str, ...] = ("gemm", *KERNELS) if stack.gathers_beside_products else KERNELS
        if load_stack(measured).flash_kernel != stack.flash_kernel:
            kernels = tuple(kernel for kernel in kernels if kernel != "attention")
        ratios = {kernel: getattr(known, kernel) / getattr(believed, kernel) for kernel in kernels}
        # clusters of one document are fitted together, and say the same
        if ratios not in elsewhere.values():
            elsewhere[name] = ratios
    return elsewhere


def load_calibration(path: str | Path) -> Calibration:
    """A calibration from a TOML file; raises TrimaranError when it cannot be read."""
    source = f"calibration {path}"
    return validate(Calibration, read_toml(path, source, "give a TOML file that trimaran fit wrote"), source)


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration as TOML, atomically."""
    dump_toml(calibration, path)


def resolve_calibration(cluster: Cluster, stack: Stack, given: Calibration | None = None) -> Calibration:
    """The calibration to predict with: the given one, else the shipped one, else what others teach."""
    return given or shipped(cluster.name, stack.name) or learned_elsewhere(cluster, stack)
