"""Starting Trimaran's own torch programs (probe, train) as processes, with a clear word where torch lacks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

from trimaran.noun import TrimaranError


def require_torch(verb: str) -> None:
    """Raise TrimaranError unless PyTorch is installed (planning alone does not need it)."""
    if importlib.util.find_spec("torch") is None:
        raise TrimaranError(f"{verb} needs PyTorch, which is not installed: pip install 'trimaran[train]'")


def run_module(module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module` with this Python, its output going to this terminal; its exit status."""
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode
