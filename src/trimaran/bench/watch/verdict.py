"""The status of a trial that has ended, and the sentence that says why."""

from __future__ import annotations

import contextlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from trimaran.bench.launch.contract import Launch
from trimaran.bench.watch.evidence import last_lines, printable
from trimaran.bench.watch.watch import Ending
from trimaran.nouns.columns import Status
from trimaran.protocol.exits import OUT_OF_MEMORY, USER_ERROR, noted_out_of_memory, signal_name
from trimaran.protocol.files import RunFile

_FULL_DISK_BYTES = 1 << 20

_SAYS_OOM = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryError|std::bad_alloc|OutOfMemoryError",
    re.IGNORECASE,
)

# glibc's dynamic linker goes on without a library that it does not find, and says so before the program begins
_SAYS_NOT_LOADED = re.compile(
    r"ERROR: ld\.so: object '([^'\n]{1,200})' from LD_PRELOAD (cannot be [^:\n]{1,200}): ignored"
)
_HEAD_BYTES = 8 * 1024

# What a rank says that failed because another had.
_LOST_A_PEER = re.compile(
    r"PeerDiedError|Connection (closed|reset) by peer|Connection refused|Broken pipe|Dist(Network|Backend|Store)Error"
)
# The line in which a Python process says why it ends; PyTorch puts the rank before it.
_SAYS_WHY = re.compile(r"(?:\[rank\d+\]: )?((?:trimaran: |Fatal Python error: |[\w.]+(?:Error|Exception)(?::|$)).*)")


@dataclass(frozen=True)
class Verdict:
    """How a trial ended, and the rank that it is laid to, where there is one.

    `refused`: that rank told of a mistake of the user's, which another start would only tell again.
    """

    status: Status
    sentence: str
    rank: int | None = None
    refused: bool = False


def verdict(ending: Ending, launch: Launch) -> Verdict:
    """Judge by what is surest first: a broken limit, what a rank wrote down, signals, exit statuses.

    `ok` here means that every rank left with 0; whether its result can be read is judged later.
    """
    if ending.cause == "hang":
        return Verdict("hang", ending.sentence, next(iter(ending.hung), None))
    if ending.cause == "timeout":
        return Verdict("timeout", ending.sentence)
    if ending.cause == "memory":
        return Verdict("oom", ending.sentence)
    if ending.cause == "lost":
        return Verdict("lost", ending.sentence)
    if ending.cause == "flood":
        return Verdict("fail", ending.sentence)
    if not ending.first_failed:
        why = not_loaded(launch.out_dir, launch.ranks)
        return Verdict("fail", why) if why else Verdict("ok", ending.sentence)
    if ending.over_memory:
        limit = f"{launch.memory_gib:.2f} GiB" if launch.memory_gib is not None else "what its machine has"
        return Verdict("oom", f"the kernel ended a process for memory: the trial's limit is {limit}")
    if out_of_memory := _out_of_memory(ending, launch):
        return out_of_memory
    return _by_exit_code(ending, launch)


def not_loaded(out_dir: Path, ranks: int) -> str | None:
    """A sentence where a library of the variant's was not loaded: the figures are then another variant's."""
    for rank in range(ranks):
        with contextlib.suppress(OSError), RunFile.STDERR.of(out_dir, rank).open("rb") as file:
            if match := _SAYS_NOT_LOADED.search(file.read(_HEAD_BYTES).decode("utf-8", errors="replace")):
                library, why = printable(match[1]), printable(match[2])
                return f"rank {rank} ran without the library {library}: it {why}; see LD_PRELOAD of the variant"
    return None


def _out_of_memory(ending: Ending, launch: Launch) -> Verdict | None:
    def noted(rank: int, code: int | None) -> bool:
        return code == OUT_OF_MEMORY or noted_out_of_memory(RunFile.ERROR.of(launch.out_dir, rank))

    def says_so(rank: int) -> bool:
        return _SAYS_OOM.search(last_lines(RunFile.STDERR.of(launch.out_dir, rank))) is not None

    ranks = [rank for rank, code in enumerate(ending.exit_codes) if noted(rank, code)]
    for rank in ranks or [rank for rank in ending.first_failed if says_so(rank)]:
        return Verdict("oom", f"rank {rank} ran out of memory: {_last_words(launch, rank)}", rank)
    return None


def _by_exit_code(ending: Ending, launch: Launch) -> Verdict:
    def code_of(rank: int) -> int:
        return ending.exit_codes[rank] or 0

    # of ranks that ended between two looks, a signal or a refusal is the cause and a plain failure its consequence
    rank = min(ending.first_failed, key=lambda rank: (code_of(rank) != USER_ERROR, code_of(rank) >= 0, rank))
    code = code_of(rank)
    if code > 0 and _LOST_A_PEER.search(_last_words(launch, rank)):
        # how the other ended is not known where something else had started it, but it may have said why
        for other in range(launch.ranks):
            if reason := _reason(launch, other):
                return Verdict("fail", f"rank {other} failed: {reason}", other)
    if code < 0:
        return Verdict("crash", f"rank {rank} was killed by {signal_name(-code)}", rank)
    if code == USER_ERROR:
        why = _last_words(launch, rank).removeprefix("trimaran: ")
        return Verdict("fail", f"rank {rank} refused: {why}", rank, refused=True)
    return Verdict("fail", f"rank {rank} left with status {code}: {_last_words(launch, rank)}", rank)


def is_consequence(sentence: str) -> bool:
    """Whether a verdict's sentence tells of no more than ranks that were told to end, or lost others that were."""
    return "SIGTERM" in sentence or _LOST_A_PEER.search(sentence) is not None


def _reason(launch: Launch, rank: int) -> str | None:
    """Why a rank says that it ends, unless that is for want of another."""
    lines = last_lines(RunFile.STDERR.of(launch.out_dir, rank)).splitlines()
    reasons = (_SAYS_WHY.match(line) for line in reversed(lines) if not _LOST_A_PEER.search(line))
    return next((reason[1][:300] for reason in reasons if reason), None)


def _last_words(launch: Launch, rank: int) -> str:
    lines = last_lines(RunFile.STDERR.of(launch.out_dir, rank)).splitlines()
    if lines:
        return lines[-1][:300]
    # a rank whose disk is full cannot say so
    full = shutil.disk_usage(launch.out_dir).free < _FULL_DISK_BYTES
    return f"no space is left on the disk of {launch.out_dir}" if full else "it said nothing"
