"""Folders of a training: what the one before it left is kept beside, under a number."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.files import CHECKPOINT, RunFile
from trimaran.protocol.job import TrainJob, read_job
from trimaran.study.training.events import EVENTS


def set_aside(folders: Sequence[Path]) -> dict[Path, Path]:
    """Rename folders of an earlier training to NAME-1, or the next number; old to new name.

    It is a number that none of them has, nor events that were kept: by it a folder and its events find each other.
    """
    kept = [folder for folder in folders if folder.is_dir() and any(_worth_keeping(folder))]
    taken = {number for folder in folders for number in (*_numbers(folder), *_numbers(folder.with_name(EVENTS)))}
    number = 1 + max(taken, default=0)
    for folder in kept:
        try:
            folder.rename(_numbered(folder, number))
        except OSError as error:
            raise TrimaranError(
                f"training folder {folder} cannot be kept as {_numbered(folder, number).name}: {error.strerror}; "
                f"check its permissions"
            ) from None
    return {folder: _numbered(folder, number) for folder in kept}


def _numbered(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}-{number}")


def _numbers(path: Path) -> Iterator[int]:
    """Numbers under which a folder, or a file of events, was set aside before."""
    name, ending = (path.stem, path.suffix) if path.name == EVENTS else (path.name, "")
    for kept in path.parent.glob(f"{name}-*{ending}"):
        text = kept.name.removeprefix(f"{name}-").removesuffix(ending)
        if text.isdecimal():
            yield int(text)


def events_of_folder(folder: Path) -> Path:
    """The file of the events of the training that a folder is of, be it one that was set aside.

    Raises TrimaranError for what a start left that a fault ended: its events are among those of the whole training.
    """
    events = folder.with_name(EVENTS)
    name, _, number = folder.name.rpartition("-")
    if not name or not number.isdecimal():
        return events
    if (kept := events.with_stem(f"{events.stem}-{number}")).exists():
        return kept
    first = folder.with_name(name)
    later = sorted(other for other in _numbers(events) if other > int(number))
    whole = _numbered(first, later[0]) if later else first
    if RunFile.LOG.of(whole).exists():
        raise TrimaranError(
            f"training folder {folder} is what one start of a training left, and its events are those of the whole "
            f"training: report {whole}"
        )
    return events


def _worth_keeping(folder: Path) -> Iterator[Path]:
    """Logs with lines, and checkpoints; a training that was killed before its first step leaves neither."""
    log = RunFile.LOG.of(folder)
    if log.exists() and log.stat().st_size:
        yield log
    yield from folder.glob(CHECKPOINT)


def earlier_logs(out_dir: Path) -> tuple[str, ...]:
    """Logs of the last training that was set aside, newest first: its own, and those that it went on from."""
    newest = max(_numbers(out_dir), default=None)
    if newest is None:
        return ()
    folder = _numbered(out_dir, newest)
    before: tuple[str, ...] = ()
    with contextlib.suppress(TrimaranError):
        before = read_job(TrainJob, RunFile.JOB.of(folder)).earlier_logs
    return own_log(folder), *before


def own_log(folder: Path) -> str:
    """The log of the start that wrote this folder, as a job names it."""
    return str(RunFile.LOG.of(folder).resolve())


class KeptStarts:
    """Folders that a training's own restarts set aside: the newest so many stay, each with a log of all steps."""

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, list[Path]()

    def keep(self, folder: Path) -> None:
        """Take one more, and remove the oldest where they are too many."""
        self._kept.append(folder)
        while len(self._kept) > self._most:
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)


def largest_rank(out_dir: Path, ranks: int) -> tuple[int, dict[str, float]] | None:
    """The rank whose memory peaked highest, and that memory in its parts (GiB), as the ranks wrote it down."""
    memory = {}
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError):
            memory[rank] = json.loads(RunFile.MEMORY.of(out_dir, rank).read_text())
    return max(memory.items(), key=lambda item: item[1]["peak"], default=None)
