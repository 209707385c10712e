"""The nouns that a measured row speaks of, and the cells that nouns fill in a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from pydantic import ValidationError

from trimaran.files.catalogue import catalogue_names, load_cluster, load_model, load_stack
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.model import Model, padded_vocab
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

# Allocators that keep freed memory for the process; glibc's gives large blocks back to the system.
KEEPING_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")


@dataclass(frozen=True)
class Nouns:
    """What a row speaks of."""

    workload: Workload
    cluster: Cluster
    stack: Stack
    layout: Layout
    variants: dict[str, str] = field(default_factory=dict)


def nouns_of(measurement: Measurement, cluster: str | None = None, stack: str | None = None) -> Nouns:
    """Workload, cluster, stack and layout of a row; the row's own names win over the arguments.

    Raises TrimaranError with the reason when the row cannot be answered.
    """
    if measurement.cp != 1:
        raise TrimaranError(f"context parallelism {measurement.cp} is not supported yet: only cp 1 is")
    cluster_name = measurement.cluster or cluster
    stack_name = measurement.stack or stack
    if cluster_name is None or stack_name is None:
        missing = "cluster" if cluster_name is None else "stack"
        raise TrimaranError(f"the row names no {missing}: fill in the column or give --{missing}")
    try:
        model = _model_of(measurement)
        workload = Workload(
            model=model,
            seq_len=measurement.seq_len,
            global_batch=measurement.gbs,
            optimizer="sgd" if measurement.optimizer == "sgd" else "adam",
        )
        layout = _layout_of(measurement)
        shaped = _shaped(_load_cluster(cluster_name), measurement)
    except ValidationError as error:
        raise TrimaranError(first_error(error)) from None
    return Nouns(workload, shaped, _preloaded(_load_stack(stack_name), measurement), layout, measurement.variants)


_load_cluster = cache(load_cluster)
_load_stack = cache(load_stack)


@cache
def _catalogue_models() -> tuple[Model, ...]:
    return tuple(load_model(name) for name in catalogue_names("models"))


def _model_of(row: Measurement) -> Model:
    """The row's model; a shape that the catalogue knows brings what a row has no column for.

    Head, tied embedding, position and norm kinds are not columns. They are taken from the
    catalogue model of the same layers, hidden, heads, ffn and vocabulary (padded or not).
    """
    ffn = row.ffn_hidden or 4 * row.hidden
    for known in _catalogue_models():
        same = (known.layers, known.hidden, known.heads, known.ffn_hidden) == (row.layers, row.hidden, row.heads, ffn)
        if same and row.vocab in {known.vocab, padded_vocab(known.vocab, row.tp), padded_vocab(known.vocab, 1)}:
            return known.model_copy(update={"max_positions": max(known.max_positions, row.seq_len), "vocab": row.vocab})
    return Model(
        name=f"{row.layers}x{row.hidden}",
        layers=row.layers,
        hidden=row.hidden,
        heads=row.heads,
        kv_heads=row.kv_heads or 0,
        ffn_hidden=ffn,
        vocab=row.vocab,
        max_positions=row.seq_len,
    )


def _layout_of(row: Measurement) -> Layout:
    dp = row.dp
    if dp is None:
        devices = row.devices or (row.nodes or 0) * (row.devices_per_node or 0)
        if not devices or devices % (row.tp * row.pp):
            raise TrimaranError(
                f"dp is empty, and devices {devices} over TP {row.tp} x PP {row.pp} does not give it: fill in dp"
            )
        dp = devices // (row.tp * row.pp)
    elif row.devices is not None and row.devices != dp * row.tp * row.pp:
        raise TrimaranError(
            f"DP {dp} x TP {row.tp} x PP {row.pp} = {dp * row.tp * row.pp}, but devices is {row.devices}: "
            f"correct the one that is wrong"
        )
    return Layout.model_validate(
        {
            "dp": dp,
            "tp": row.tp,
            "pp": row.pp,
            "vpp": row.vpp,
            "mbs": row.mbs,
            "zero_stage": row.zero_stage,
            "dp_kind": row.dp_kind,
            "recompute": "none" if row.recompute == "unknown" else row.recompute,
            "precision": row.precision,
            "schedule": row.schedule if row.pp > 1 else "none",
        }
    )


def _shaped(cluster: Cluster, row: Measurement) -> Cluster:
    """The cluster as the row ran it: its network as shaped, its clock as set, its nodes as filled."""
    inter = cluster.inter
    if row.network_gbps is not None:
        inter = inter.model_copy(update={"bandwidth_gbps": row.network_gbps})
    if row.network_delay_ms is not None:
        inter = inter.model_copy(update={"latency_us": row.network_delay_ms * 1000.0})
    device = cluster.device
    clock = row.variants.get("clock")
    if clock and device.clock_ghz:
        try:
            factor = float(clock.removesuffix("GHz")) / device.clock_ghz
        except ValueError:
            raise TrimaranError(f"variant clock={clock} is not a frequency: write it as clock=2.2GHz") from None
        peaks = {precision: peak * factor for precision, peak in device.peak_tflops.items()}
        device = device.model_copy(update={"clock_ghz": device.clock_ghz * factor, "peak_tflops": peaks})
    per_node = min(row.devices_per_node or cluster.devices_per_node, cluster.devices_per_node)
    return cluster.model_copy(update={"inter": inter, "device": device, "devices_per_node": per_node})


def _preloaded(stack: Stack, row: Measurement) -> Stack:
    """The stack as the row ran it: an allocator of LD_PRELOAD keeps what is freed."""
    preload = row.variants.get("LD_PRELOAD", "")
    if any(name in preload for name in KEEPING_ALLOCATORS):
        return stack.model_copy(update={"keeps_freed_memory": True})
    return stack


def layout_cells(layout: Layout) -> Iterator[tuple[str, str | int]]:
    """The columns that a layout fills in a row."""
    yield from (("dp", layout.dp), ("tp", layout.tp), ("pp", layout.pp), ("vpp", layout.vpp), ("mbs", layout.mbs))
    yield from (("zero_stage", layout.zero_stage), ("dp_kind", layout.dp_kind), ("recompute", layout.recompute))
    yield from (("precision", layout.precision), ("schedule", layout.schedule))


def workload_cells(workload: Workload) -> Iterator[tuple[str, str | int]]:
    """The columns that a workload fills in a row."""
    model = workload.model
    yield from (("layers", model.layers), ("hidden", model.hidden), ("ffn_hidden", model.ffn_hidden))
    yield from (("heads", model.heads), ("kv_heads", model.kv_heads), ("vocab", model.vocab))
    yield from (("seq_len", workload.seq_len), ("gbs", workload.global_batch), ("optimizer", workload.optimizer))
