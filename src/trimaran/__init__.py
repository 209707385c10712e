"""Trimaran: the fastest way to train a given transformer on a given cluster, proved by measurement.

`trimaran.plan(...)` and `trimaran.predict(...)` answer in Python what the command line answers in a
shell; trimaran.api holds them with their types. They are loaded when first used.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The verbs of the Python API, imported on first use so that `import trimaran` stays light."""
    if name == "plan":
        import trimaran.plan as room

        return room
    if name == "predict":
        from trimaran.api import predict

        return predict
    raise AttributeError(f"module 'trimaran' has no attribute {name!r}")
