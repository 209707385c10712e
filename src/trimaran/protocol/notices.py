"""Notices: what the user should be told of while a training runs, beside its log."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from trimaran.protocol.line_file import LineFile


class Notice(StrEnum):
    """Kinds of notices, the field `kind` of each, with their other fields."""

    RESUMED = "resumed"  # step, path, layout, changed (sentences)
    SAVED = "saved"  # step, path, write_s, blocked_s, waited_s
    HELD = "held"  # step, blocked_s, held_s, gib (by node)
    BROUGHT_BACK = "brought_back"  # text
    STOPPED = "stopped"  # step
    NOT_SAVED = "not_saved"  # of a checkpoint: step, text (a sentence)
    NOT_HELD = "not_held"  # of snapshots in memory: text
    DAMAGED = "damaged"  # step, text
    SLOW = "slow"  # step, rank, why
    BAD_LOSS = "bad_loss"  # step, why, done (what was done, in words), back_to (the step gone back to, or null)


class Tell(Protocol):
    """What notices are handed to."""

    def __call__(self, kind: Notice, /, **fields: object) -> None:
        """Take a notice: its kind, and its other fields."""
        ...


class Notices:
    """Appends notices to a file, a line of JSON each; rank 0 writes it, other ranks tell nothing (None)."""

    def __init__(self, file: Path | None) -> None:
        self._file = None if file is None else LineFile(file)

    def tell(self, kind: Notice, /, **fields: object) -> None:
        """Append a notice."""
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
