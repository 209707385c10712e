"""Files of lines that are written as a training goes, and must not end it where their disk is full."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path


class LineFile:
    """A text file that begins empty; what finds no room waits in memory, and goes before the next text.

    All that has found room is out of this process when `write` returns.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._waiting = b""
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        """Append text, a whole line or more."""
        with self._lock:
            self._waiting += text.encode()
            with contextlib.suppress(OSError):
                while self._waiting:
                    self._waiting = self._waiting[self._file.write(self._waiting) :]
