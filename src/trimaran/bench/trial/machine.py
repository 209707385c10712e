"""What a row must say about where it was measured: machine, libraries, environment, code."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.variant import TUNING_PREFIXES
from trimaran.protocol.host import memory_gib, processor_name, usable_cores

_LIBRARIES = ("torch", "numpy", "pydantic")
_LOOK = """
import importlib.metadata, json, platform, sys
versions = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(versions))
"""


def hardware() -> str:
    """Processor, cores and memory in one line."""
    return f"{processor_name()}, {usable_cores()} cores, {memory_gib():.1f} GiB"


@functools.cache
def machine() -> str:
    """Hardware and kernel in one line."""
    return f"{hardware()}, {platform.system()} {platform.release()}"


@functools.cache
def libraries(python: str) -> dict[str, str]:
    """Versions of Python and of the libraries that the figures depend on, as interpreter `python` has them.

    Raises TrimaranError where it is no Python with Trimaran and PyTorch installed.
    """
    command = [python, "-P", "-c", _LOOK, "trimaran", *_LIBRARIES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        versions = {str(name): str(version) for name, version in json.loads(done.stdout).items()}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise TrimaranError(f"python {python!r} does not run ({error}): name an interpreter") from None
    for needed in ("trimaran", "torch"):
        if needed not in versions:
            raise TrimaranError(f"python {python!r} has no {needed}: install it there, or name another interpreter")
    return {name: version for name, version in versions.items() if name != "trimaran"}


def tuning_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables among `environment` that change speed or memory."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(TUNING_PREFIXES)}


@functools.cache
def code_version() -> str:
    """Trimaran's version; in a checkout with the commit, and `+` where files were changed."""
    version = importlib.metadata.version("trimaran")
    checkout = Path(__file__).parents[4]
    if not (checkout / ".git").exists():
        return version
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version} ({commit})"
