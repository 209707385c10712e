"""How a program that another room starts tells its starter what remains."""

from __future__ import annotations

import sys
from typing import TextIO

MARK = "progress: "


def tell(text: str, stream: TextIO | None = None) -> None:
    """One line of progress, on standard error unless `stream` says otherwise."""
    print(f"{MARK}{text}", file=stream or sys.stderr, flush=True)
