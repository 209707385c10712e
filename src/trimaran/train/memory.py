"""Memory of one rank: what it peaked at, and what it held before the model was built."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

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
