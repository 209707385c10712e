"""How a rank tells that it failed: one line on stderr, an exit status, and a note where memory ran out."""

from __future__ import annotations

import sys

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.exits import OUT_OF_MEMORY, note_out_of_memory
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob


def tell_failure(error: Exception, rank: int, job: TrainJob | None) -> int:
    """Tell of the user's mistake or of memory that ran out; returns the exit status. Raises any other error again.

    `job` is None where the rank failed before it knew its job.
    """
    if isinstance(error, TrimaranError):
        print(f"trimaran: {error}", file=sys.stderr)
        return error.exit_status
    if not is_out_of_memory(error):
        raise error
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    print(f"trimaran: rank {rank} is out of memory: {line}", file=sys.stderr)
    if job is not None:
        note_out_of_memory(RunFile.ERROR.of(job.out_dir, rank), line)
    return OUT_OF_MEMORY


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text))
    )
