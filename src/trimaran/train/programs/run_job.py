"""What the programs that other rooms start have in common: a job file in, one line for a user's mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.exits import USER_ERROR
from trimaran.protocol.job import Job, read_job


def run_job(kind: type[Job], do: Callable[[Job], None], arguments: list[str]) -> int:
    """Read the job file that `arguments` name and do it; returns the exit status."""
    if len(arguments) != 1:
        print("usage: python -m trimaran.train.programs.PROGRAM JOB.json", file=sys.stderr)
        return USER_ERROR
    try:
        do(read_job(kind, Path(arguments[0])))
    except ImportError as error:
        print(f"trimaran: {error.name} is not installed: pip install 'trimaran[train]'", file=sys.stderr)
        return USER_ERROR
    except (TrimaranError, OSError) as error:
        print(f"trimaran: {error}", file=sys.stderr)
        return USER_ERROR
    return 0
