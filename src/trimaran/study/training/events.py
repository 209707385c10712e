"""Events of a training's life, a row each in `events.csv`: starts, faults, layouts that changed, its end."""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from trimaran.nouns.noun import Noun, TrimaranError, first_error

EVENTS = "events.csv"
# Three centuries: no training takes longer, and sums of so many seconds are numbers that a noun takes.
LONGEST_S = 1e10
StepNumber = Annotated[int, Field(ge=0, lt=10**15)]
Seconds = Annotated[float, Field(ge=0, lt=LONGEST_S)]


class EventKind(StrEnum):
    """What happened; the faults are called as the status of a trial is that ends so."""

    BEGAN = "began"  # ranks were started by a command, anew or with --resume
    FIRST_STEP = "first_step"  # the ranks of a command made their first step, before any fault
    WENT_ON = "went_on"  # ranks that were started after a fault, or on more devices, made their first step
    CRASH = "crash"
    HANG = "hang"
    FAIL = "fail"
    LOST = "lost"
    OOM = "oom"
    TIMEOUT = "timeout"
    NOT_RUN = "not_run"
    GROWN = "grown"  # ranks saved and left, since more devices are there than they used
    STOPPED = "stopped"  # as asked by a signal
    FINISHED = "finished"
    SAVED = "saved"  # a checkpoint is written
    NOT_SAVED = "not_saved"  # a checkpoint that was due is not, as where a disk is full
    SLOW = "slow"  # a rank takes longer for its own work than the others
    BAD_LOSS = "bad_loss"  # a loss or gradient that is not finite, or a loss that leaps


# What ends a start of the ranks without being asked for.
FAULTS = frozenset({EventKind.CRASH, EventKind.HANG, EventKind.FAIL, EventKind.LOST, EventKind.OOM, EventKind.TIMEOUT})


class Event(Noun):
    """One row. `lost_steps` were made and have to be made again, and took `lost_s`.

    `seconds`: of `first_step`, since the command's ranks were to begin; of `went_on`, from the last step before a fault
    to the first after it; of `saved`, for which the training stood still; of a fault, for how long such a one may go
    unnoticed. `waited_s` of them passed until ranks could be started, as in a queue.
    """

    at: str = Field(description="UTC, ISO 8601")
    event: EventKind
    step: StepNumber = Field(description="the newest step that was made")
    saved_step: StepNumber = Field(description="the newest step that a checkpoint has; 0: none")
    layout: str = Field(description="in short notation")
    rank: int | None = None
    node: str | None = None
    lost_steps: StepNumber | None = None
    lost_s: Seconds | None = None
    seconds: Seconds | None = None
    waited_s: Seconds | None = None
    why: str | None = None

    @field_validator("at")
    @classmethod
    def _check_time(cls, at: str) -> str:
        try:
            known = datetime.datetime.fromisoformat(at).tzinfo is not None
        except ValueError:
            known = False
        if not known:
            raise ValueError("a time with its zone is expected, as 2026-03-01T12:00:00+00:00")
        return at


COLUMNS = list(Event.model_fields)


class EventLog:
    """Appends rows to the file, a line each; those that find no room on the disk wait for the next."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting, self._continues = path, b"", False

    def add(self, event: Event) -> None:
        """Append a row, under a heading where the file has none yet, and behind what a killed training cut off."""
        cells = event.model_dump(mode="json")
        if event.why is not None:
            cells["why"] = " ".join(event.why.split())
        text = io.StringIO()
        csv.DictWriter(text, COLUMNS, lineterminator="\n").writerow(cells)
        self._waiting += text.getvalue().encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            if not self._continues:
                self._waiting, self._continues = _ahead_of_rows(self._path) + self._waiting, True
            with self._path.open("ab", buffering=0) as file:
                while self._waiting:
                    self._waiting = self._waiting[file.write(self._waiting) :]


def _ahead_of_rows(path: Path) -> bytes:
    """What a file needs before rows can be appended: a heading, or the end of a line. What cannot be kept goes."""
    heading = (",".join(COLUMNS) + "\n").encode()
    there = path.read_bytes() if path.exists() else b""
    if b"\n" not in there:
        path.unlink(missing_ok=True)  # a heading that was cut off
        return heading
    return b"" if there.endswith(b"\n") else b"\n"


def events_of(text: str, what: str) -> tuple[list[Event], int]:
    """The rows of the file, and how many lines are none, as where a kill or a full disk cut them off.

    The last line counts for nothing where it has no end yet. Raises TrimaranError, with `what` and the line, for a row
    that says what no training writes.
    """
    heading, *lines = text.split("\n")
    if lines and heading != ",".join(COLUMNS):
        raise TrimaranError(f"{what}: line 1 does not have the columns {', '.join(COLUMNS)}")
    found, cut = [], 0
    for number, line in enumerate(lines[:-1], start=2):
        try:
            cells = next(csv.reader([line], strict=True), [])
        except csv.Error:
            cells = []
        if len(cells) != len(COLUMNS):
            cut += 1
            continue
        try:
            row = {name: cell or None for name, cell in zip(COLUMNS, cells, strict=True)}
            found.append(Event.model_validate(row))
        except ValidationError as error:
            raise TrimaranError(f"{what}: line {number}: {first_error(error)}") from None
    return found, cut


def set_events_aside(path: Path, training: Path | None) -> None:
    """Rename the file of an earlier training, whose rows are no part of the next one's life, to `events-N.csv`.

    N is the number of the folder that the `training` is kept as, or the next free one. A training that made no step,
    as one that was refused, leaves nothing to keep.
    """
    try:
        made_steps = any(event.step for event in events_of(path.read_text(errors="replace"), str(path))[0])
    except TrimaranError:
        made_steps = True
    if training is None and not made_steps:
        path.unlink()
        return
    number = int(training.name.rpartition("-")[2]) if training is not None else 1
    while (kept := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    path.rename(kept)


def seconds_between(first: str, last: str) -> float:
    """Seconds from one time of a row to another."""
    return (datetime.datetime.fromisoformat(last) - datetime.datetime.fromisoformat(first)).total_seconds()


def now() -> str:
    """This moment, in UTC to the millisecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
