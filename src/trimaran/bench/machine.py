"""What a row must say about where it was measured: machine, libraries, environment, code."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from trimaran.host import memory_gib, processor_name, usable_cores

_LIBRARIES = ("torch", "numpy", "pydantic")
# Variables that change how fast or how large a rank is.
_TELLING_PREFIXES = ("OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "CUDA_", "MALLOC_", "LD_")


@functools.cache
def machine() -> str:
    """Processor, cores, memory and kernel in one line."""
    system = f"{platform.system()} {platform.release()}"
    return f"{processor_name()}, {usable_cores()} cores, {memory_gib():.1f} GiB, {system}"


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
    version = importlib.metadata.version("trimaran")
    checkout = Path(__file__).parents[3]
    if not (checkout / ".git").exists():
        return version
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version} ({commit})"
