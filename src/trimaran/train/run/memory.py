"""Memory of one rank: what it peaked at, and what it held before the model was built."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trimaran.train.engine.flat_weights import FlatWeights

GIB = float(1 << 30)


def resident_gib() -> float:
    """Resident memory of this process now (Linux; elsewhere its peak so far)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_resident_gib()
    return pages * os.sysconf("SC_PAGE_SIZE") / GIB


def peak_resident_gib() -> float:
    """Largest resident memory of this process.

    Linux's VmHWM is preferred to getrusage, whose figure a child inherits from the parent that
    started it.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 / GIB
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def memory_record(device: torch.device, baseline_gib: float) -> dict[str, float]:
    """Peak memory in GiB: `peak` is what a plan predicts, the rest is what it is made of.

    CPU: `peak` is the resident peak, `baseline` what the process held with its libraries and
    connections before the model was built. CUDA: `peak` is what the allocator reserved plus the
    context, `allocated` what tensors took of it.
    """
    if device.type == "cpu":
        return {"peak": peak_resident_gib(), "baseline": baseline_gib}
    free, total = torch.cuda.mem_get_info(device)
    reserved_now = torch.cuda.memory_reserved(device) / GIB
    context = max(0.0, (total - free) / GIB - reserved_now)
    reserved = torch.cuda.max_memory_reserved(device) / GIB
    return {
        "peak": reserved + context,
        "reserved": reserved,
        "allocated": torch.cuda.max_memory_allocated(device) / GIB,
        "context": context,
        "baseline": baseline_gib,
    }


def memory_parts(
    flat: FlatWeights, state: Mapping[str, Sequence[Tensor]], record: Mapping[str, float]
) -> dict[str, float]:
    """The record with its peak split as the cost model splits it, GiB.

    Weights, gradients and optimizer state (master weights among it) are what their tensors hold now; `context` is
    what was there before the model, and `rest` all else of the peak: activations, logits, buffers, and what the
    allocator keeps.
    """
    weights = [*(unit.weights for unit in flat.units), *(flat.master if flat.master_is_weights else ())]
    of_optimizer = [*flat.master, *(tensor for tensors in state.values() for tensor in tensors), *weights]
    parts = {
        "weights": _held_gib(weights),
        "gradients": _held_gib([*flat.grads, *(unit.grads for unit in flat.units)]),
        "optimizer": _held_gib(of_optimizer) - _held_gib(weights),
        "context": record.get("context", record["baseline"]),
    }
    return {**record, **parts, "rest": max(0.0, record["peak"] - sum(parts.values()))}


def _held_gib(tensors: Iterable[Tensor]) -> float:
    """Memory behind tensors, counted once where several are views of it."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) / GIB
