"""Imports of PyTorch, which take seconds of a core in every process that makes them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import in this block without collecting garbage, of which imports leave none: it takes a fifth of their time.

    What they made is not looked through later either: modules stay.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collected:
            gc.enable()
