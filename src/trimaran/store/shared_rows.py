"""Rows of a store on a file system that several hosts share: every process appends to a file of its own.

SQLite's write-ahead log needs memory that all its processes share, and its other journals need locks; a network file
system has not the one, and often not the other (https://www.sqlite.org/wal.html, https://www.sqlite.org/lockingv3.html).
Nothing here is ever written by two: readers merge all files, and take no notice of a last line that is not finished.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from trimaran.files.user_file import MIB, open_file, read_text
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError, first_error

# Types of file systems, as Linux names them, that several hosts may write at once. Ceph's client calls itself ceph-fuse
# there (ceph-csi, internal/cephfs/fuserecovery.go), DAOS's daos (client/dfuse/pil4dfs), 3FS's hf3fs
# (src/lib/api/UsrbIo.cc), Quobyte's quobyte (libvirt, src/util/virfile.c).
_SHARED = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "smb3", "wekafs",
     "fuse.ceph", "fuse.ceph-fuse", "fuse.daos", "fuse.glusterfs", "fuse.hf3fs", "fuse.juicefs", "fuse.mfs",
     "fuse.quobyte", "fuse.sshfs"}
)  # fmt: skip

_LIMIT_BYTES = 64 * MIB
_OCTAL = re.compile(r"\\([0-7]{3})")  # how the table of mounts writes a space


class SharedRows:
    """The folder of a store's files of rows: what others append is read on, what this process adds goes to its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._taken: dict[str, tuple[int, int]] = {}  # bytes and lines of each file
        self._own: IO[bytes] | None = None

    def new(self) -> list[Measurement]:
        """Rows since the last call, of every process, by when they were made.

        Raises TrimaranError for one that is damaged.
        """
        rows: list[tuple[str, str, int, Measurement]] = []
        taken: dict[str, tuple[int, int]] = {}
        try:
            names = sorted(os.listdir(self._folder))  # noqa: PTH208 - makes a network file system look anew
        except OSError:
            return []
        for name in (name for name in names if name.endswith(".jsonl")):
            path = self._folder / name
            offset, before = self._taken.get(name, (0, 0))
            try:
                with open_file(path, f"store file {path}", None) as file:
                    file.seek(offset)
                    block = file.read()
            except OSError as error:
                raise TrimaranError(f"store file {path} cannot be read: {error.strerror}") from None
            whole = block[: block.rfind(b"\n") + 1]
            lines = whole.splitlines()
            taken[name] = offset + len(whole), before + len(lines)
            for number, line in enumerate(lines, before + 1):
                row = _row(line, path, number)
                rows.append((row.created_at or "", name, number, row))
        self._taken |= taken
        return [row for *_, row in sorted(rows, key=lambda entry: entry[:3])]

    def add(self, rows: Iterable[Measurement]) -> None:
        """Append rows, all or none, until they are on the disk. Raises TrimaranError where they cannot be."""
        lines = b"".join(row.model_dump_json().encode() + b"\n" for row in rows)
        try:
            if self._own is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                name = f"{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
                self._own = (self._folder / name).open("xb", buffering=0)
            before = self._own.tell()
            try:
                while lines:
                    lines = lines[self._own.write(lines) :]
                os.fsync(self._own.fileno())
            except OSError:
                self._own.seek(before)
                self._own.truncate()
                raise
        except OSError as error:
            raise TrimaranError(
                f"store {self._folder}: a row cannot be written ({error.strerror}); rows stored before are kept: "
                f"free space, or check its permissions, and run again"
            ) from None

    def require_writable(self) -> None:
        """Raise TrimaranError where this process cannot make the file of its rows, which is made."""
        self.add([])

    def close(self) -> None:
        """Close the file of this process."""
        if self._own is not None:
            self._own.close()


def _row(line: bytes, path: Path, number: int) -> Measurement:
    try:
        return Measurement.model_validate_json(line)
    except ValidationError as error:
        raise TrimaranError(f"store file {path}, line {number}: {first_error(error)}") from None


def made_after(before: Measurement | None, row: Measurement) -> Measurement:
    """A row as made after the last of its trial that is stored, also where the clock of that row's host is ahead.

    Whoever merges the files of all hosts has times alone to tell which attempt is the last.
    """
    with contextlib.suppress(ValueError, TypeError, OverflowError):  # a time that a hand has written
        if before and before.created_at and row.created_at:
            moment = datetime.datetime.fromisoformat(before.created_at)
            if datetime.datetime.fromisoformat(row.created_at) <= moment:
                moment += datetime.timedelta(seconds=1)
                return row.model_copy(update={"created_at": moment.isoformat(timespec="seconds")})
    return row


def place(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all; of two hosts that do so at once, either's will do."""
    partial = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def copied(path: Path, folder: Path) -> Path:
    """A copy of a store's file in `folder`, and of what a killed process left in a write-ahead log beside it."""
    for name in (path.name, f"{path.name}-wal"):
        if path.with_name(name).exists():
            shutil.copyfile(path.with_name(name), folder / name)
    return folder / path.name


def is_shared(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether a folder lies on a file system that several hosts may write at once, by the table of mounts."""
    try:
        lines = read_text(mounts, "the table of mounts", _LIMIT_BYTES, "see proc(5)").splitlines()
    except TrimaranError:
        return False
    resolved, kind, deepest = folder.resolve(), "", -1
    for line in lines:
        # proc(5): the mount point is the fifth field, the type the first behind a lone hyphen
        before, _, behind = line.partition(" - ")
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), before.split()[4]))
        if resolved.is_relative_to(point) and len(point.parts) >= deepest:
            kind, deepest = behind.split()[0], len(point.parts)
    return kind in _SHARED
