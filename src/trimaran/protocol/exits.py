"""How ranks end: the statuses that they leave with, and what a rank that ran out of memory writes down first."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.json_file import write_json

# The user's mistake, told in one line; the command line leaves with the same.
USER_ERROR = TrimaranError.exit_status
OUT_OF_MEMORY = 41
# sysexits.h EX_TEMPFAIL: saved and left as it was told to. A scheduler may start the same command again.
STOPPED = 75
# Of processes whose starter has ended: nobody reads them but a batch system's log.
LAUNCHER_GONE, SWEEP_GONE = 75, 76

_NOTE_BYTES = 1 << 16


def signal_name(number: int) -> str:
    """The name of a signal, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def note_out_of_memory(file: Path, message: str) -> None:
    """Write down that a rank ran out of memory, since a library may hide its exit status."""
    write_json(file, {"kind": "oom", "message": message})


def noted_out_of_memory(file: Path) -> bool:
    """Whether a rank wrote that down; False where there is no such file, or none that can be read."""
    try:
        with file.open("rb") as note:
            content = json.loads(note.read(_NOTE_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("kind") == "oom"
