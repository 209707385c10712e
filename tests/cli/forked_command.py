"""What becomes of a call of the command line: in a forked process, measured, and killed where it hangs."""

from __future__ import annotations

import io
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.command_server import read_modules

import trimaran.cli

read_modules()  # here, before the first fork, so that no try has to

# What a person waits for. Nothing is taken off for the modules that a fresh process has to read, since other tests make
# the machine slower.
MOST_CPU_S = 2.0
MOST_GIB = 0.5
# Processor time tells how much work a try makes, wall time how busy the machine is. What waits for ever makes no work.
HANG_S = 60.0


@dataclass(frozen=True)
class Try:
    """Arguments of the command line, of which something is wrong, or nothing."""

    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What a try ended in: exit status (None: killed as a hang), all that it printed, processor time, memory."""

    status: int | None
    output: str
    cpu_s: float
    peak_gib: float

    def complaint(self, tried: Try) -> str | None:
        """What is wrong with the answer, or None."""
        lines = self.output.strip().splitlines()
        reasons = [
            ("a hang", self.status is None),
            ("a traceback", "Traceback" in self.output),
            (f"status {self.status}", self.status not in (None, 0, 2)),
            (f"{len(lines)} lines", self.status != 0 and len(lines) > 3),
            ("a long line", self.status != 0 and any(len(line) > 2000 for line in lines)),
            ("control characters", any(not c.isprintable() and c not in "\n\t" for c in self.output)),
            (f"{self.cpu_s:.2f} s", self.cpu_s > MOST_CPU_S),
            (f"{self.peak_gib:.2f} GiB", self.peak_gib > MOST_GIB),
            ("no word", self.status != 0 and not lines),
        ]
        found = ", ".join(reason for reason, wrong in reasons if wrong)
        shown = [argument[:200] for argument in tried.arguments]
        return f"{found}: trimaran {shown}\n{self.output[-1500:]}" if found else None


@contextmanager
def taken_port() -> Iterator[int]:
    """A port that is in use, so that what would serve on it ends."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def answer(tried: Try, folder: Path) -> Answer:
    """Run the command's own entry in a process of its own, forked so that it need not read its modules again."""
    printed = folder / "printed"
    # what the tests before it left in this process is not the command's
    there_gib = _resident_gib()
    pid = os.fork()
    if pid == 0:
        _be_the_command(tried, folder, printed)
    begin = time.monotonic()
    while True:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() - begin > HANG_S:
            os.killpg(pid, signal.SIGKILL)
            _, status, used = os.wait4(pid, 0)
            break
        time.sleep(0.002)
    text = printed.read_bytes().decode(errors="backslashreplace")
    code = os.waitstatus_to_exitcode(status)
    cpu_s = used.ru_utime + used.ru_stime
    peak_gib = max(0.0, used.ru_maxrss / 2**20 - there_gib)
    return Answer(None if code == -signal.SIGKILL else code, text, cpu_s, peak_gib)


def _resident_gib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def _be_the_command(tried: Try, folder: Path, printed: Path) -> None:
    status = 70
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        # as the interpreter makes them, whatever a test's runner has put there
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8") for fd in (1, 2))
        sys.argv = ["trimaran", *tried.arguments]
        resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        trimaran.cli.main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
