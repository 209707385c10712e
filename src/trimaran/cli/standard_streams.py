"""Standard streams that were closed, or that take nothing: no reason for a long work to fail."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO


class _Dropping(io.FileIO):
    """Standard error that loses what it cannot take: work must not end because what is said of it finds no reader.

    So it is where `tee` ends by the same Ctrl-C, the disk of a job's log is full, or the terminal is gone.
    """

    def write(self, content: Any, /) -> int:
        try:
            taken = super().write(content)
        except OSError:
            taken = None
        return len(content) if taken is None else taken


class Unread(BaseException):
    """Nobody reads what is printed any more, as behind `head`. No OSError: Click would make a mistake of it."""


class _Named(io.FileIO):
    """Standard output whose errors say that it is meant."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for what is still buffered when Python ends
            if isinstance(error, BrokenPipeError):
                raise Unread from None
            error.filename = "standard output"
            raise


def open_standard_streams() -> None:
    """Have descriptors 0 to 2 lead nowhere where this was started without them, as a service may be.

    A file or a socket opened here would take their numbers, and what is started from here would use it as its own.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # which takes the lowest number that is free


def keep_working_unheard() -> None:
    """Write to standard error through `_Dropping`, where it is a file of the system's or was closed."""
    stream: TextIO | None = sys.stderr  # None where it was closed: what is said there would be printed as output
    with suppress(OSError):  # raised where it has no number, as in a program that catches what is printed
        number, encoding = (stream.fileno(), stream.encoding) if stream else (2, "utf-8")
        raw = _Dropping(number, "wb", closefd=False)
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, line_buffering=True)


def name_standard_output() -> None:
    """Write to standard output through `_Named`, where it is a file of the system's; where it was closed, nowhere."""
    stream: TextIO | None = sys.stdout
    with suppress(OSError):
        if stream:
            raw, lines = _Named(stream.fileno(), "wb", closefd=False), stream.isatty()
            sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding=stream.encoding, line_buffering=lines)
