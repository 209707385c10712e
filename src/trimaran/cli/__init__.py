"""The command line: one small file per verb, errors in one line, exit status 2."""

from __future__ import annotations

import io
import signal
import sys
from types import FrameType

from trimaran.cli.standard_streams import Unread, keep_working_unheard, name_standard_output, open_standard_streams
from trimaran.protocol.wishes import Wishes, stop_signals

INTERRUPTED = 130
TERMINATED = 143
UNREAD = 141  # as of a program that SIGPIPE has ended
# What an interrupted verb has kept; the others keep nothing before they end.
_REST = "what was finished is kept, the same command goes on with the rest"
_KEPT = {
    "bench": _REST,
    "tune": _REST,
    "train": "the same command with --resume goes on from the last checkpoint, where there is one",
}


class _Terminated(BaseException):
    """SIGTERM or SIGUSR1, as batch systems send them, or SIGHUP of a terminal that is gone.

    Ends the verb as Ctrl-C does, so that nothing is left running.
    """


def main() -> None:
    """Entry point of the `trimaran` command."""
    open_standard_streams()
    keep_working_unheard()
    name_standard_output()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter shows another for it
    _end_on_signals()
    try:
        from trimaran.cli.app import app  # which takes a while, and may be interrupted

        status = app(standalone_mode=False)
        if sys.stdout:
            sys.stdout.flush()
    except (KeyboardInterrupt, _Terminated) as stop:
        _fail_if_stopped(stop)
    except Unread:
        sys.exit(UNREAD)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; check the path, its permissions and free space")
    except Exception as error:
        # not at the top of this file: pydantic comes with it, and would double the time that --help takes
        from trimaran.nouns.noun import TrimaranError

        if isinstance(error, TrimaranError):
            _fail(str(error), error.exit_status)
        # Python 3.11 has what interrupts the making of a class, as in an import, as the cause of an error of its own
        _fail_if_stopped(error.__cause__)
        # Typer carries its own copy of Click's usage errors, which it does not export
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        _fail(_usage(error))
    if status == INTERRUPTED:
        _fail(_stopped("interrupted"), INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _end_on_signals() -> None:
    """Have signals end the verb by an exception, each wish once."""
    endings: dict[int, type[BaseException]] = dict.fromkeys(stop_signals(), _Terminated)
    endings[signal.SIGINT] = KeyboardInterrupt
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        del endings[signal.SIGINT]  # whoever started this had it ignored
    wishes = Wishes()

    def end(number: int, _frame: FrameType | None) -> None:
        if wishes.is_new():
            raise endings[number]

    for number in endings:
        signal.signal(number, end)


def _fail_if_stopped(why: BaseException | None) -> None:
    """End with the line and the status of a verb that was stopped, where that is why."""
    if isinstance(why, KeyboardInterrupt):
        _fail(_stopped("interrupted"), INTERRUPTED)
    if isinstance(why, _Terminated):
        _fail(_stopped("terminated"), TERMINATED)


def _stopped(how: str) -> str:
    """How this verb was stopped, and what goes on from what it has kept."""
    verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    kept = None if "--dry-run" in sys.argv else _KEPT.get(verb)
    return f"{how}; {kept}" if kept else how


def _usage(error: Exception) -> str:
    """A usage error of Click's with the value that it does not show, and the help to read."""
    message: str = error.format_message()  # type: ignore[attr-defined]
    names = getattr(getattr(error, "param", None), "opts", ())
    command = getattr(getattr(error, "ctx", None), "command_path", "trimaran")
    shown = ""
    for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in names and "Invalid value" in message:
            shown = f" (it is {value if equals else following!r})"
    return f"{message.replace('Value error, ', '').rstrip('.')}{shown}: see {command} --help"


def _fail(message: str, status: int = 2) -> None:
    # what is told holds: one more signal while this process ends must not leave with another status
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    from trimaran.nouns.text import one_line

    print(f"trimaran: {one_line(message)}", file=sys.stderr)
    sys.exit(status)
