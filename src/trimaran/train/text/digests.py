"""Digests of text files, remembered while these do not change: a corpus of terabytes takes long to read each time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from pathlib import Path

from trimaran.files.catalogue import write_atomically
from trimaran.files.user_file import MIB, open_file, read_json
from trimaran.nouns.noun import TrimaranError

# A file that has changed so lately may change again without its time telling, which some systems count in seconds.
SETTLED_S = 10.0
_LIMIT_BYTES = 256 * MIB
_DIGEST = re.compile(r"[0-9a-f]{128}")


class Digests:
    """Digests by what the system says of a file: its number, its size, and when it was last written and changed.

    The last cannot be set by whoever writes the file. `memory` is the file that remembers; one that cannot be read or
    written is as none.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._before: dict[str, object] = {}
        with contextlib.suppress(TrimaranError):
            content = read_json(memory, "digests", _LIMIT_BYTES)
            self._before = content if isinstance(content, dict) else {}
        self._now: dict[str, list[str]] = {}

    def of(self, file: Path, what: str) -> str:
        """The digest of a file that errors call `what`. Raises TrimaranError or OSError where it cannot be read."""
        began = time.time()
        with open_file(file, what, None) as opened:
            status = os.fstat(opened.fileno())
            times = status.st_mtime_ns, status.st_ctime_ns
            known_by = " ".join(map(str, (status.st_ino, status.st_size, *times)))
            match self._before.get(str(file)):
                case [str(before), str(digest)] if before == known_by and _DIGEST.fullmatch(digest):
                    pass
                case _:
                    digest = hashlib.file_digest(opened, "blake2b").hexdigest()
        if began - max(times) / 1e9 >= SETTLED_S:
            self._now[str(file)] = [known_by, digest]
        return digest

    def keep(self) -> None:
        """Remember the digests that were asked for."""
        if self._now != self._before:
            with contextlib.suppress(TrimaranError):
                write_atomically(self._memory, json.dumps(self._now))
