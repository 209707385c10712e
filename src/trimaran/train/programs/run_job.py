"""What the programs that other rooms start have in common: a job file in, one line for a user's mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from trimaran.nouns.noun import Noun, TrimaranError, first_error

Job = TypeVar("Job", bound=Noun)
EXIT_USER_ERROR = 2


def run_job(kind: type[Job], do: Callable[[Job], None], arguments: list[str]) -> int:
    """Read the job file that `arguments` name and do it; returns the exit status."""
    if len(arguments) != 1:
        print("usage: python -m trimaran.train.PROGRAM JOB.json", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        do(kind.model_validate_json(Path(arguments[0]).read_text()))
    except OSError as error:
        print(f"trimaran: job {arguments[0]} cannot be read: {error.strerror}", file=sys.stderr)
        return EXIT_USER_ERROR
    except ValidationError as error:
        print(f"trimaran: job {arguments[0]}: {first_error(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except TrimaranError as error:
        print(f"trimaran: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0
