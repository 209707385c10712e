"""How a rank's process ends once all it has to say is written."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End the process with `status`, without taking the interpreter down piece by piece.

    Threads of torch's process groups that are still about then abort a finished rank now and then
    ("terminate called without an active exception"). Trackers of runs close themselves by atexit.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
