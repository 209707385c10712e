"""Text of others: read within limits, and made safe to print."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from datetime import datetime
from io import BytesIO
from pathlib import Path

from trimaran.files.user_file import read_bytes
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import COLOURS
from trimaran.store.importers.json_text import is_json

MAX_BYTES = 256 * 1024 * 1024
MAX_LINE = 64 * 1024

# How files of programs that pack begin; gzip's are read.
_GZIP = b"\x1f\x8b"
_PACKED = {b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}

# What stands for bytes that are not UTF-8, and for the rest of a line that is too long.
REPLACED = "\ufffd"
CUT = REPLACED + "..."
# So much of a file tells UTF-16 without its mark: every second byte of most of its letters is zero.
_LOOKED_AT = 4096
# A log must not steer the reader's terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")
# What launchers put before each line: torchrun's tee, srun --label, mpirun --tag-output of Open MPI 4 and 5, kubectl
# logs with --prefix and --timestamps, Ray, SkyPilot.
# `[rank0]:` stays, since torchtitan's memory is told by it, and so does a time that a trainer prints itself.
_PREFIXES = re.compile(
    r"^(?:\[default\d{1,6}\]:|[ ]{0,6}\d{1,6}: |\[(?:[\w.-]{1,120}@)?\d{1,9},\d{1,9}\]<std(?:out|err)>: ?"
    r"|\[pod/[^\]\s]{1,300}\] |\([\w.-]{1,80}(?:, rank=\d{1,7})?,? pid=\d{1,9}[^)\n]{0,80}\) "
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d) )+",
    re.MULTILINE,
)
# What a network file system leaves where a node died before its lines were written.
_HOLE = re.compile("\0{2,}")


def read_text(path: Path, *, strict: bool = False) -> str:
    """The file's text as `decoded` gives it, without control characters.

    A line that is longer than MAX_LINE, as a dump amid a log's lines, is cut there and ends in CUT; under `strict`, or
    where all lines are, it is refused. JSON, which programs write in one line, may be of any length. Raises
    TrimaranError too where the file cannot be read or is larger than MAX_BYTES.
    """
    text = _HOLE.sub("\n", decoded(path, strict=strict))
    lines = text.split("\n")
    longest = max(map(len, lines), default=0)
    if longest > MAX_LINE and (strict or not is_json(text)):
        if strict or not any(line.strip() for line in lines if len(line) <= MAX_LINE):
            raise TrimaranError(
                f"{path} has a line of {longest} characters, above the limit of {MAX_LINE}: is it text?"
            )
        text = "\n".join(line if len(line) <= MAX_LINE else line[:MAX_LINE] + CUT for line in lines)
    return clean(text)


def decoded(path: Path, *, strict: bool = False) -> str:
    """The file's text in UTF-8 or UTF-16, with line feeds as line ends.

    What gzip packed is unpacked. Bytes that are not UTF-8 are replaced, since logs hold them; under `strict` they are
    refused. Raises TrimaranError where the file cannot be read, is packed by another program or larger than MAX_BYTES.
    """
    size = path.stat().st_size if path.is_file() else 0
    if size > MAX_BYTES:
        raise TrimaranError(
            f"{path} has {size // 2**20} MiB, more than the {MAX_BYTES // 2**20} MiB that are read: keep the lines of "
            f"its trainer, as by grep -av NCCL {path.name} > less.log"
        )
    raw = _unpacked(read_bytes(path, str(path), MAX_BYTES), path)
    try:
        text = raw.decode(_encoding(raw), errors="strict" if strict else "replace")
    except UnicodeDecodeError:
        raise TrimaranError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _encoding(raw: bytes) -> str:
    if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return "utf-16"
    first, second = (raw[:_LOOKED_AT][at::2] for at in (0, 1))
    zeros = first.count(0), second.count(0)
    # a hole of zeros has them at both places
    if zeros[1] > len(second) / 2 and not zeros[0]:
        return "utf-16-le"
    return "utf-16-be" if zeros[0] > len(first) / 2 and not zeros[1] else "utf-8-sig"


def _unpacked(raw: bytes, path: Path) -> bytes:
    if packer := next((name for start, name in _PACKED.items() if raw.startswith(start)), None):
        raise TrimaranError(f"{path} is packed by {packer}: unpack it first")
    if not raw.startswith(_GZIP):
        return raw
    try:
        content = gzip.GzipFile(fileobj=BytesIO(raw)).read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TrimaranError(f"{path} begins as gzip's files do, and cannot be unpacked: {error}") from None
    if len(content) > MAX_BYTES:
        raise TrimaranError(
            f"{path} unpacks to more than the {MAX_BYTES // 2**20} MiB that are read: keep the lines of its trainer, "
            f"as by zcat {path.name} | grep -av NCCL > less.log"
        )
    return content


def clean(text: str) -> str:
    """The text without terminal colours and control characters (tabs and line ends stay)."""
    return _CONTROL.sub(" ", COLOURS.sub("", text))


def without_prefixes(text: str) -> str:
    """A log's text without what launchers put before its lines."""
    return _PREFIXES.sub("", text)


def number_of(text: str | None) -> float | None:
    """The number that a word of a log is, thousands set apart or not; None where it is none or beyond any figure."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if abs(value) < 1e30 else None


def loss_of(text: str) -> float | None:
    """The loss that a word of a log is: NaN where it is none that is finite; None where it is no number.

    A bar of Lightning pads a word as it does a number: `nan.0`.
    """
    return math.nan if text.lower().lstrip("+-").removesuffix(".0") in ("nan", "inf") else number_of(text)


def clock_of(stamp: re.Match[str] | None) -> float | None:
    """Seconds of a time stamp, matched as date and time and as milliseconds, if any; None where there is none."""
    if stamp is None:
        return None
    try:
        return datetime.fromisoformat(stamp[1]).timestamp() + int(stamp[2] or 0) / 1000.0
    except (ValueError, OverflowError, OSError):
        return None
