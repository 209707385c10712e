"""Text of others: read within limits, and made safe to print."""

from __future__ import annotations

import gzip
import re
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from datetime import datetime
from io import BytesIO
from pathlib import Path

from trimaran.files.user_file import read_bytes
from trimaran.nouns.noun import TrimaranError

MAX_BYTES = 256 * 1024 * 1024
MAX_LINE = 64 * 1024

# How files of programs that pack begin; gzip's are read.
_GZIP = b"\x1f\x8b"
_PACKED = {b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}

# What stands for bytes that are not UTF-8.
REPLACED = "\ufffd"
# Colours of a terminal, then every other control character: a log must not steer the reader's terminal.
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")
# What a network file system leaves where a node died before its lines were written.
_HOLE = re.compile("\0{2,}")


def read_text(path: Path, *, strict: bool = False) -> str:
    """The file's text in UTF-8 or marked UTF-16, with line feeds as line ends and without control characters.

    What gzip packed is unpacked. Bytes that are not UTF-8 are replaced, since logs hold them; under `strict` they are
    refused. Raises TrimaranError where the file cannot be read, is packed by another program, is larger than
    MAX_BYTES, or has a line longer than MAX_LINE.
    """
    raw = _unpacked(read_bytes(path, str(path), MAX_BYTES), path)
    encoding = "utf-16" if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig"
    try:
        text = raw.decode(encoding, errors="strict" if strict else "replace")
    except UnicodeDecodeError:
        raise TrimaranError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _HOLE.sub("\n", text)
    longest = max(map(len, text.split("\n")), default=0)
    if longest > MAX_LINE:
        raise TrimaranError(f"{path} has a line of {longest} characters, above the limit of {MAX_LINE}: is it text?")
    return clean(text)


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
        raise TrimaranError(f"{path} unpacks to more than {MAX_BYTES // 2**20} MiB, the most that is read of a file")
    return content


def clean(text: str) -> str:
    """The text without terminal colours and control characters (tabs and line ends stay)."""
    return _CONTROL.sub(" ", _COLOUR.sub("", text))


def number_of(text: str | None) -> float | None:
    """The number that a word of a log is, thousands set apart or not; None where it is none or beyond any figure."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if abs(value) < 1e30 else None


def clock_of(stamp: re.Match[str] | None) -> float | None:
    """Seconds of a time stamp, matched as date and time and as milliseconds; None where there is none."""
    if stamp is None:
        return None
    try:
        return datetime.fromisoformat(stamp[1]).timestamp() + int(stamp[2]) / 1000.0
    except (ValueError, OverflowError, OSError):
        return None
