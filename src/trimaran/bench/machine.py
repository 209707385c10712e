"""What a row must say about where it was measured: machine, libraries, environment, code."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import trimaran

_LIBRARIES = ("torch", "numpy", "pydantic")
# Variables that change how fast or how large a rank is.
_TELLING_PREFIXES = ("OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "CUDA_", "MALLOC_", "LD_")


@functools.cache
def machine() -> str:
    """Processor, cores, memory and kernel in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_processor()}, {usable_cores()} cores, {memory:.1f} GiB, {platform.system()} {platform.release()}"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def libraries() -> dict[str, str]:
    """Versions of Python and of the libraries that the figures hang on, without importing them."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def telling_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables among `environment` that change speed or memory."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_TELLING_PREFIXES)}


@functools.cache
def code_version() -> str:
    """Trimaran's version; in a checkout with the commit, and `+` where files were changed."""
    checkout = Path(trimaran.__file__).parents[2]
    if not (checkout / ".git").exists():
        return trimaran.__version__
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return trimaran.__version__
    return f"{trimaran.__version__} ({commit})"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, "") or platform.processor() or platform.machine()
