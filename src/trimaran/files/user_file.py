"""Files that a user names: the one place that opens them, as regular files and within a limit of their size.

A device, a pipe or a folder under the name of a file would be read without end, or never answer; a file of any size
would fill the memory. tests/house/test_user_files.py holds that no room opens a file of a user's in another way.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from importlib.resources.abc import Traversable
from io import BufferedReader
from pathlib import Path
from typing import Any

from trimaran.nouns.noun import TrimaranError

MIB = 2**20
# Nouns, recipes and calibrations are of a few KiB; a probed cluster of some hundred.
NOUN_BYTES = 2 * MIB
TABLE_BYTES = 128 * MIB
# No noun is nested as deep; reading what is takes a time that grows with the square of the depth.
MOST_NESTED = 32
_SAVE_FIRST = "save what it gives to a file first, and name that"
_KEY = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DEEP_KEY = re.compile(rf"(?<![\w.-])(?:{_KEY}[ \t]*+\.[ \t]*+){{{MOST_NESTED}}}")


def from_home(path: str) -> Path:
    """The path, with a home directory in place of ~ or ~NAME at its front.

    Raises TrimaranError where there is none, as of a user whom a container does not know.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise TrimaranError(f"{path}: {user} has no home directory here: write the whole path, or set HOME") from None


def regular_file(path: str | Path, what: str, limit_bytes: int | None) -> Path:
    """The path, for a library that opens files by itself, once it is known to be a regular file of no more bytes.

    `what` names the file in errors, as `table t.csv`. `limit_bytes` is None for what is mapped or read piece by piece,
    and may be of any size. Raises TrimaranError where it is missing, something else, or larger.
    """
    try:
        status = Path(path).stat()
    except OSError as error:
        if str(path) == "-":
            raise TrimaranError(f"{what} cannot be read: it is not a regular file but a pipe; {_SAVE_FIRST}") from None
        raise TrimaranError(f"{what} cannot be read: {error.strerror or error}; check the path") from None
    except ValueError as error:  # a path that no file system takes
        raise TrimaranError(f"{what} cannot be read: {error}; check the path") from None
    _check(status, what, limit_bytes)
    return Path(path)


def open_file(path: str | Path, what: str, limit_bytes: int | None) -> BufferedReader:
    """A regular file, opened to be read. Raises TrimaranError as `regular_file` does."""
    regular_file(path, what, limit_bytes)
    try:
        # what has become a pipe since then must not keep the opener waiting
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        file = os.fdopen(descriptor, "rb")
    except OSError as error:
        raise TrimaranError(f"{what} cannot be read: {error.strerror or error}; check the path") from None
    try:
        _check(os.fstat(file.fileno()), what, limit_bytes)
    except TrimaranError:
        file.close()
        raise
    return file


def read_bytes(path: str | Path, what: str, limit_bytes: int) -> bytes:
    """All of a regular file of at most so many bytes. Raises TrimaranError as `open_file` does."""
    with open_file(path, what, limit_bytes) as file:
        try:
            content = file.read(limit_bytes + 1)  # a file may grow while it is read, and one of /proc has no size
        except OSError as error:
            raise TrimaranError(f"{what} cannot be read: {error.strerror or error}; check the path") from None
    if len(content) > limit_bytes:
        raise _too_large(what, limit_bytes)
    return content


def read_text(path: str | Path, what: str, limit_bytes: int, expected: str) -> str:
    """All of a regular file in UTF-8; `expected` says what to give where it is not. Raises TrimaranError."""
    content = read_bytes(path, what, limit_bytes)
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise TrimaranError(f"{what} is not UTF-8 text: {expected}") from None


def read_toml(path: str | Path | Traversable, what: str, expected: str = "give a TOML file") -> dict[str, Any]:
    """The table of a TOML file, a user's or a packaged one.

    Raises TrimaranError where it cannot be read, is none, or states nothing.
    """
    table = toml_table(file_text(path, what, NOUN_BYTES, expected), what)
    if not table:
        raise TrimaranError(f"{what} is empty: {expected}")
    return table


def toml_table(text: str, what: str) -> dict[str, Any]:
    """The table of a TOML text. Raises TrimaranError, naming `what`, where it is none."""
    if _DEEP_KEY.search(text):
        raise TrimaranError(f"{what} is not valid TOML: a key of it is nested more than {MOST_NESTED} deep: correct it")
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrimaranError(f"{what} is not valid TOML: {_reason(error)}") from None
    _require_shallow(table, what)
    return table


def read_json(path: str | Path, what: str, limit_bytes: int = NOUN_BYTES, expected: str = "give a JSON file") -> Any:
    """What a JSON file holds. Raises TrimaranError where it cannot be read or is not JSON."""
    text = file_text(path, what, limit_bytes, expected)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrimaranError(f"{what} is not valid JSON: {_reason(error)}; {expected}") from None
    _require_shallow(content, what)
    return content


def _too_large(what: str, limit_bytes: int) -> TrimaranError:
    size = f"{limit_bytes // MIB} MiB" if limit_bytes >= MIB else f"{limit_bytes} bytes"
    return TrimaranError(f"{what} has more than {size}, the most that is read of such a file: is it the right one?")


def file_text(path: str | Path | Traversable, what: str, limit_bytes: int, expected: str) -> str:
    """The text of a file, a user's or a packaged one. Raises TrimaranError as `read_text` does."""
    if isinstance(path, str | Path):
        return read_text(path, what, limit_bytes, expected)
    return path.read_text(encoding="utf-8")


def _check(status: os.stat_result, what: str, limit_bytes: int | None) -> None:
    mode = status.st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
        kind = next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")
        way_out = "name a file in it" if stat.S_ISDIR(mode) else _SAVE_FIRST
        raise TrimaranError(f"{what} cannot be read: it is not a regular file but {kind}; {way_out}")
    if limit_bytes is not None and status.st_size > limit_bytes:
        raise _too_large(what, limit_bytes)


def _reason(error: Exception) -> str:
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)


def _require_shallow(content: Any, what: str) -> None:
    """Raise TrimaranError where lists and tables lie deeper in each other than any noun's do."""
    level = [content]
    for _ in range(MOST_NESTED):
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)]
        if not level:
            return
    raise TrimaranError(f"{what} is nested more than {MOST_NESTED} deep: correct it")


def _inside(outer: Any) -> Any:
    return outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ()
