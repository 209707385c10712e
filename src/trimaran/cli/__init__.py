"""The command line: one small file per verb, errors in one line, exit status 2."""

from __future__ import annotations

import sys

from trimaran.noun import TrimaranError


def main() -> None:
    """Entry point of the `trimaran` command."""
    from trimaran.cli.app import app

    try:
        app()
    except TrimaranError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; what was finished is kept, run the same command again to go on", status=130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; check the path, its permissions and free space")


def _fail(message: str, status: int = 2) -> None:
    line = " ".join(message.split())
    print(f"trimaran: {line}", file=sys.stderr)
    sys.exit(status)
