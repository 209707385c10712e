"""Trimaran: the fastest way to train a given transformer on a given cluster, proved by measurement.

`trimaran.plan(...)` and `trimaran.predict(...)` answer in Python what the command line answers in a
shell; trimaran.api holds them with their types. They are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimaran.version import __version__

if TYPE_CHECKING:
    from trimaran.api import plan, predict

__all__ = ["__version__", "plan", "predict"]


def __getattr__(name: str) -> Any:
    """The verbs of the Python API, imported on first use so that `import trimaran` stays light."""
    if name in ("plan", "predict"):
        from trimaran import api

        return getattr(api, name)
    raise AttributeError(f"module 'trimaran' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names that a user may mean, those not loaded yet among them."""
    return sorted({*globals(), *__all__})
