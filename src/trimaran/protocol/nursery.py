"""Ranks forked from one process that has imported what they need: the trainer's, and those of a probe.

Importing takes a second of a core in every rank that is started: `benchmarks/results/harness.md` has both.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trimaran.protocol.forks import MESSAGE_BYTES, ForkReport, ForkRequest
from trimaran.protocol.programs import NURSERY
from trimaran.protocol.rank_process import settled

# For imports from a slow disk; ranks that start by themselves are then no slower.
_READY_WITHIN_S = 120.0


class NurseryLostError(OSError):
    """The process that ranks are forked from does not answer."""


class Nursery:
    """A running process that forks ranks, all by one command (a rank's, short of its arguments) in one environment."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking.settimeout(_READY_WITHIN_S)
        self._exit_codes: dict[int, int] = {}
        with theirs:
            self._process = subprocess.Popen(
                settled(("-", "-", "-"), (*command, NURSERY, str(theirs.fileno()))),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._under = (tuple(command), dict(environment))

    def serves(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether it lives, and its ranks are what this command would start in this environment."""
        return self._under == (tuple(command), dict(environment)) and self.lives()

    def lives(self) -> bool:
        """Whether the process is there to fork ranks, and the ranks that it has forked with it."""
        return self._process.poll() is None

    def fork(
        self,
        settles: Sequence[str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        output: tuple[int, int],
        handed: Mapping[str, int],
    ) -> ForkedRank:
        """One rank, which runs by now. `handed` are descriptors by the variables that name them.

        Raises NurseryLostError where the process does not answer.
        """
        request = ForkRequest(list(settles), list(arguments), dict(environment), str(folder), list(handed))
        try:
            socket.send_fds(self._asking, [request.encoded()], [*output, *handed.values()])
            while (report := self._next_report()).exit_code is not None:
                self._exit_codes[report.pid] = report.exit_code
        except OSError as error:
            raise NurseryLostError(f"no rank could be forked: {error}") from None
        return ForkedRank(report.pid, self)

    def exit_code(self, pid: int, *, wait: bool) -> int | None:
        """How a rank ended; None while it runs, unless it is waited for."""
        self._asking.settimeout(None if wait else 0.0)
        try:
            while pid not in self._exit_codes:
                report = self._next_report()
                if report.exit_code is not None:
                    self._exit_codes[report.pid] = report.exit_code
        except BlockingIOError:
            return None
        except OSError:
            self._exit_codes[pid] = -signal.SIGKILL  # ranks do not outlive the process that they were forked from
        finally:
            self._asking.settimeout(_READY_WITHIN_S)
        return self._exit_codes[pid]

    def _next_report(self) -> ForkReport:
        message = self._asking.recv(MESSAGE_BYTES)
        if not message:
            raise NurseryLostError("it has ended")
        return ForkReport.decoded(message)

    def close(self) -> None:
        """End it, and with it ranks that still run."""
        self._asking.close()
        self._process.kill()
        self._process.wait()


class ForkedRank:
    """A rank as `subprocess.Popen` would show it."""

    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid, self._nursery = pid, nursery

    def poll(self) -> int | None:
        """Exit status; None while it runs."""
        return self._nursery.exit_code(self.pid, wait=False)

    def wait(self) -> int:
        """Exit status, once it has ended."""
        code = self._nursery.exit_code(self.pid, wait=True)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal while it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
