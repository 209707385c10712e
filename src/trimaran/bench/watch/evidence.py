"""What a failed trial leaves behind for a person to read."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from trimaran.bench.watch.flight import waited_in
from trimaran.protocol.files import RunFile

_TAIL_BYTES = 8 * 1024
_LIMIT_CHARACTERS = 32 * 1024
# With less room than this on a disk, what a trial leaves there is kept only where it is small.
_LITTLE_ROOM_BYTES, _SMALL_MIB = 8 << 20, 1.0


def last_lines(path: Path, count: int = 40) -> str:
    """The last lines of a text file, blank ones left out; empty where there is none.

    Bytes that are no text, and control characters that could command a terminal, become marks.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(printable(line) for line in lines[-count:])


def printable(line: str) -> str:
    """The line with everything that is not printable replaced."""
    return "".join(char if char.isprintable() or char == "\t" else "\N{REPLACEMENT CHARACTER}" for char in line)


def collect(
    sentence: str,
    out_dir: Path,
    exit_codes: tuple[int | None, ...],
    silence_s: tuple[float, ...],
    remarks: Mapping[int, str],
) -> str:
    """The sentence, each rank's exit status (or what else is known of it) and silence, what it waited in, its logs."""
    parts = [sentence]
    for rank, (code, silent) in enumerate(zip(exit_codes, silence_s, strict=True)):
        ended = remarks.get(rank, "was still running") if code is None else f"left with {code}"
        parts.append(f"rank {rank}: {ended}, last sign {silent:.1f} s before the end")
    ranks = range(len(exit_codes))
    parts += [printable(line) for rank in ranks if (line := waited_in(out_dir, rank))]
    logs = [(RunFile.LOG_TEXT, 0), *((kind, rank) for rank in ranks for kind in (RunFile.STDERR, RunFile.STDOUT))]
    for log in (kind.of(out_dir, rank) for kind, rank in logs):
        if tail := last_lines(log):
            parts.append(f"--- {log.name}\n{tail}")
    return "\n".join(parts)[:_LIMIT_CHARACTERS]


def drop_large_files(out_dir: Path, limit_mib: float) -> list[str]:
    """Remove files of more than `limit_mib` MiB from a trial's folder; says which, with their sizes.

    Where the disk is all but full, that is files of more than 1 MiB: a trial that filled it must not take the rest
    of the sweep along.
    """
    with contextlib.suppress(OSError):
        if shutil.disk_usage(out_dir).free < _LITTLE_ROOM_BYTES:
            limit_mib = min(limit_mib, _SMALL_MIB)
    dropped = []
    for path in sorted(out_dir.rglob("*")):
        with contextlib.suppress(OSError):
            mib = path.lstat().st_size / 2**20
            if mib > limit_mib and (path.is_symlink() or path.is_file()):
                path.unlink()
                dropped.append(f"{printable(str(path.relative_to(out_dir)))} of {mib:.0f} MiB was removed")
    return dropped
