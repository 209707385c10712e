"""TensorBoard's event files as a text of one JSON object a point: what a tracked run's history looks like elsewhere.

The container is TFRecord's (a length of 8 bytes, 4 of its checksum, the record, 4 of its checksum) and each record an
`Event` in protocol buffers' wire format (tensorboard/compat/proto/event.proto, summary.proto, tensor.proto). Both are
read here, since planning does without the package `tensorboard`. Checksums are not looked at.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from trimaran.files.user_file import open_file
from trimaran.nouns.noun import TrimaranError

# Names of a point beside its scalars: the trainer's step, its clock in seconds, and which start of the run it is of.
STEP, CLOCK, START = "_step", "_timestamp", "_start"

_MAX_TEXT = 256 * 1024 * 1024
# What is longer is an image, a graph or an embedding, and is passed over.
_MAX_RECORD = 16 * 1024 * 1024
_VERSION = b"brain.Event:"
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_FLOAT, _DOUBLE = 1, 2  # `DataType` of tensors


def event_files(path: Path) -> list[Path]:
    """The event files that a path is, or that lie in it; none where it is something else."""
    if path.is_dir():
        found = [file for file in path.iterdir() if "tfevents" in file.name and file.is_file()]
        return sorted(found, key=lambda file: file.name)
    if not path.is_file():
        return []
    with open_file(path, str(path), None) as file:
        return [path] if _VERSION in file.read(64) else []


def event_runs(folder: Path) -> list[Path]:
    """The folders at and below a folder that hold event files: TensorBoard shows each of them as a run.

    Those without a scalar, as a Trainer makes for its hyperparameters, are left out where others have one.
    """
    below = (Path(at) for at, _, _ in os.walk(folder))
    runs = sorted(run for run in below if event_files(run))
    return [run for run in runs if any(_has_scalars(file) for file in event_files(run))] or runs


def _has_scalars(path: Path) -> bool:
    """Whether a file holds a scalar; one that cannot be read may hold some."""
    try:
        return next(_events(path), None) is not None
    except TrimaranError:
        return True


def event_text(files: list[Path]) -> str:
    """The scalars of event files of one run, a line for each point, in the order in which they were written.

    Files may be of any size. Raises TrimaranError where one is damaged, or where their scalars alone are too many; a
    record that is cut off, as at the end of a file that is being written, is left out.
    """
    lines, size = [], 0
    for start, path in enumerate(files):
        for clock, step, values in _events(path):
            lines.append(json.dumps({START: start, STEP: step, CLOCK: clock, **values}, allow_nan=True) + "\n")
            size += len(lines[-1])
            if size > _MAX_TEXT:
                raise TrimaranError(
                    f"{path} has more scalars than the {_MAX_TEXT // 2**20} MiB that are read: export those of the "
                    f"loss and the step's time as JSON or CSV"
                )
    return "".join(lines)


def _events(path: Path) -> Iterator[tuple[float, int, dict[str, float]]]:
    """Clock, step and scalars of each record that has one."""
    at = 0
    with open_file(path, str(path), None) as file:
        try:
            while record := _record(file):
                length, content = record
                clock, step, values = _event(content)
                if values:
                    yield clock, step, values
                at += 12 + length + 4
        except (ValueError, struct.error):
            raise TrimaranError(
                f"{path} is damaged at byte {at}: export its scalars as CSV, or name another file"
            ) from None
        except OSError as error:
            raise TrimaranError(f"{path} cannot be read: {error.strerror or error}; check the path") from None


def _record(file: BufferedReader) -> tuple[int, bytes] | None:
    """The next record's length and content, which is empty where it is too long; None where no whole one follows."""
    head = file.read(12)
    if len(head) < 12:
        return None
    (length,) = struct.unpack_from("<Q", head)
    if length > os.fstat(file.fileno()).st_size - file.tell():
        return None
    if length > _MAX_RECORD:
        file.seek(length, os.SEEK_CUR)
        content = b""
    else:
        content = file.read(length)
    file.read(4)
    return length, content


def _event(record: bytes) -> tuple[float, int, dict[str, float]]:
    """The clock, the step and the scalars of one record."""
    clock, step = 0.0, 0
    values: dict[str, float] = {}
    for number, value in _fields(record):
        if number == 1 and isinstance(value, float):
            clock = value
        elif number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            values |= _scalars(value)
    return clock, step, values


def _scalars(summary: bytes) -> dict[str, float]:
    """Tags and values of a summary; what is no scalar is passed over."""
    found = {}
    for number, value in _fields(summary):
        if number != 1 or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, content in _fields(value):
            if inner == 1 and isinstance(content, bytes):
                tag = content.decode("utf-8", errors="replace")
            elif inner == 2 and isinstance(content, bytes):
                (scalar,) = struct.unpack("<f", content)
            elif inner == 8 and isinstance(content, bytes):
                scalar = _scalar_of_tensor(content)
        if scalar is not None:
            found[tag] = scalar
    return found


def _scalar_of_tensor(tensor: bytes) -> float | None:
    """The number in a tensor of one float or double."""
    kind, content = 0, b""
    for number, value in _fields(tensor):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in (4, 5, 6) and isinstance(value, bytes):
            content = value
    forms = {_FLOAT: "<f", _DOUBLE: "<d"}
    if kind not in forms or len(content) != struct.calcsize(forms[kind]):
        return None
    return float(struct.unpack(forms[kind], content)[0])


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Numbers and values of a message's fields: a double as a float, four bytes as they are."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
        elif kind == _EIGHT:
            yield number, float(struct.unpack_from("<d", message, at)[0])
            at += 8
        elif kind in (_BYTES, _FOUR):
            length, at = _varint(message, at) if kind == _BYTES else (4, at)
            if at + length > len(message):
                raise ValueError("a field is longer than its message")
            yield number, message[at : at + length]
            at += length
        else:
            raise ValueError(f"wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of up to 64 bits, and where the next begins."""
    value = 0
    for place in range(10):
        if at + place >= len(message):
            break
        byte = message[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("a number has no end")
