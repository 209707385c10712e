"""Where `make peers` installs the software of others, and what a benchmark says that cannot do without it.

    python benchmarks/_peers.py

As a program it looks for what some of `make bench` need, so that it is not missed after an hour of the others.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

INSTALLED = Path(__file__).parents[1] / ".peers"
# Those whose layers are traced and timed.
NEEDED = ("megatron", "torchtitan")


def is_installed(package: str) -> bool:
    """Whether a package of others is at hand."""
    return (INSTALLED / package).is_dir() or importlib.util.find_spec(package) is not None


def need_peers() -> None:
    """Let what others wrote be imported; what is missing ends the program with a line that says how to install it."""
    missing = [package for package in NEEDED if not is_installed(package)]
    if missing:
        sys.exit(f"{' and '.join(missing)}: not installed in {INSTALLED}; run `make peers` first")
    sys.path.append(str(INSTALLED))


if __name__ == "__main__":
    need_peers()
