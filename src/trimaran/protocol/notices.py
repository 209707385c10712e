"""Notices: what the user should be told of while a training runs, beside its log."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tell = Callable[[dict[str, Any]], None]


class Notices:
    """`notices.jsonl`: what the user should be told of, beside the log's lines. Rank 0 writes it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / "notices.jsonl").open("w", buffering=1) if rank == 0 else None
        self._lock = threading.Lock()

    def tell(self, notice: dict[str, Any]) -> None:
        """Append one notice; `kind` says what it is."""
        if self._file is not None:
            with self._lock:
                self._file.write(json.dumps(notice) + "\n")
