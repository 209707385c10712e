"""What ran a row, of the names that it states: its cluster as filled and shaped, its software as told to run.

A table names a cluster and a stack by their kind, and says in words what was special: `H100-96GB HBM2e`,
`+ torch.compile`. Entries of the catalogue (`noted`) say which of its other entries such words speak of.
"""

from __future__ import annotations

from functools import cache

from trimaran.files.catalogue import (
    catalogue_name,
    catalogue_names,
    load_cluster,
    load_device,
    load_stack,
    looks_like_path,
    unknown_name,
)
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.precision import PRECISIONS
from trimaran.nouns.spoken.noted import first_said
from trimaran.nouns.stack import Stack
from trimaran.nouns.text import quoted

# Allocators that keep freed memory for the process; glibc's gives large blocks back to the system.
KEEPING_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")

_load_device = cache(load_device)


@cache
def _load_cluster(name: str) -> Cluster:
    return load_cluster(_spelled("cluster", name))


@cache
def _load_stack(name: str) -> Stack:
    return load_stack(_spelled("stack", name))


def _spelled(kind: str, cell: str) -> str:
    """The path, or the catalogue's name, that a cell spells. Raises TrimaranError, and says how to give another."""
    name = catalogue_name(f"{kind}s", cell)
    if name in catalogue_names(f"{kind}s") or looks_like_path(name):
        return name
    way_out = f"give its file, or a name that the catalogue has, by --{kind}."
    raise TrimaranError(unknown_name(f"{kind}s", cell, way_out))


def known_or_given(row: Measurement, cluster: str | None, stack: str | None) -> tuple[Measurement, tuple[str, ...]]:
    """The row without a cluster or stack that its author alone knows, where another is given; and notes on these."""
    given = {"cluster": cluster, "stack": stack}
    foreign = {
        kind: name
        for kind, name in (("cluster", row.cluster), ("stack", row.stack))
        if given[kind] and name and not looks_like_path(name)
        if catalogue_name(f"{kind}s", name) not in catalogue_names(f"{kind}s")
    }
    if not foreign:
        return row, ()
    notes = (f"{kind} {quoted(name)} is not in the catalogue: read as {given[kind]}" for kind, name in foreign.items())
    return row.model_copy(update=dict.fromkeys(foreign)), tuple(notes)


def subject(cluster: str, stack: str) -> tuple[str, str]:
    """What the named cluster and stack call themselves: those of one fit are the same, however each row ran."""
    return _load_cluster(cluster).name, _load_stack(stack).name


def cluster_as_named(row: Measurement, name: str) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster of that name, of the devices that the row's column `hardware` speaks of; and a note on these."""
    cluster = _load_cluster(name)
    said = first_said(cluster.device.noted, row.hardware or "")
    if said is None or cluster.groups:
        return cluster, ()
    note = f"hardware says {said.words}: devices read as {said.read_as}"
    return cluster.model_copy(update={"device": _load_device(said.read_as)}), (note,)


def cluster_as_run(row: Measurement, cluster: Cluster, devices: int) -> Cluster:
    """The cluster as the row ran it on so many devices: its network as shaped, its clock as set, its nodes as filled.

    Raises TrimaranError where the row's variant states a clock that is no frequency.
    """
    # A table may count a rack's hosts, whose devices the rack's fast link joins all the same.
    is_host = row.devices_per_node is not None and row.devices_per_node == cluster.devices_per_host
    if is_host or row.devices_per_node is None:
        cluster = cluster.of_a_job(devices)
    inter = cluster.inter
    per_node = (None if is_host else row.devices_per_node) or cluster.devices_per_node
    if not cluster.device.cores:
        # Processes may share a node's cores, but not its GPUs.
        per_node = min(per_node, cluster.devices_per_node)
    if row.network_gbps is not None:
        inter = inter.model_copy(update={"bandwidth_gbps": row.network_gbps})
    elif cluster.cards_per_node >= cluster.devices_per_node:
        # devices that were not used left the cards beside them idle
        used = inter.bandwidth_gbps * min(1.0, per_node / cluster.devices_per_node)
        inter = inter.model_copy(update={"bandwidth_gbps": used})
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
    return cluster.model_copy(update={"inter": inter, "device": device, "devices_per_node": per_node})


def devices_as_run(row: Measurement, cluster: str) -> Measurement:
    """The row with the devices that it used: where it states nodes alone, all that those of the named cluster have."""
    if row.dp or row.devices or row.devices_per_node or not row.nodes:
        return row
    return row.model_copy(update={"devices": row.nodes * _load_cluster(cluster).devices_per_node})


def stack_as_run(row: Measurement, name: str) -> tuple[Stack, tuple[str, ...]]:
    """The stack of that name as the row ran it, and notes on what its words say of it.

    Some software runs narrow precisions another way than its others; an allocator of LD_PRELOAD keeps what is freed.
    """
    stack, notes = _load_stack(name), list[str]()
    is_narrow = row.precision in {precision.name for precision in PRECISIONS.values() if precision.narrow}
    if stack.narrow_as and is_narrow and row.precision not in stack.precisions:
        stack = _load_stack(stack.narrow_as)
    for column in ("system", "notes"):
        while (said := first_said(stack.noted, getattr(row, column) or "", row.date)) is not None:
            stack = _load_stack(said.read_as)
            notes.append(f"{column} says {said.words}: read as {stack.name}")
    if any(allocator in row.variants.get("LD_PRELOAD", "") for allocator in KEEPING_ALLOCATORS):
        stack = stack.model_copy(update={"keeps_freed_memory": True})
    return stack, tuple(notes)
