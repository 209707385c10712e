"""The command line: one small file per verb, errors in one line, exit status 2."""

from __future__ import annotations

import sys

from trimaran.noun import TrimaranError

INTERRUPTED = 130


def main() -> None:
    """Entry point of the `trimaran` command."""
    from trimaran.cli.app import app

    try:
        status = app(standalone_mode=False)
    except TrimaranError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; check the path, its permissions and free space")
    except Exception as error:
        # Typer carries its own copy of Click's usage errors, which it does not export
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        _fail(f"{error.format_message()} (see trimaran VERB --help)")
    if status == INTERRUPTED:
        _fail("interrupted; what was finished is kept, run the same command again to go on", INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int = 2) -> None:
    line = " ".join(message.split())
    print(f"trimaran: {line}", file=sys.stderr)
    sys.exit(status)
