"""Trimaran: the fastest way to train a given transformer on a given cluster, proved by measurement.

`trimaran.plan(...)` and `trimaran.predict(...)` answer in Python what the command line answers in a
shell; trimaran.api holds them with their types. They are loaded when first used.
"""

from typing import TYPE_CHECKING

from trimaran.version import __version__

# An editor follows this; at run time `import trimaran` stays light.
if TYPE_CHECKING:
    from trimaran.api import plan, predict
    from trimaran.nouns.noun import TrimaranError

__all__ = ["TrimaranError", "__version__", "plan", "predict"]
_HOMES = {"plan": "trimaran.api", "predict": "trimaran.api", "TrimaranError": "trimaran.nouns.noun"}


def __getattr__(name: str) -> object:
    """The functions of the Python API, imported on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trimaran' has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    """What a user may mean: the names of the Python API, loaded or not, and none of what makes them."""
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})
