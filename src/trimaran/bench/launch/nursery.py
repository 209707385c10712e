"""Ranks of the trainer forked from one process that has imported what they need.

Importing takes a second of a core in every rank that is started: `benchmarks/results/harness.md` has both.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimaran.protocol.programs import TRAINER
from trimaran.protocol.rank_process import settled

# A trainer's command behind its interpreter, up to its arguments.
# -P: a file in the current folder must not stand in for a module of the trainer's

# For imports from a slow disk; ranks that start by themselves are then no slower.
_READY_WITHIN_S = 120.0
_MESSAGE_BYTES = 1 << 17


class NurseryLostError(OSError):
    """The process that ranks are forked from does not answer."""


class Nursery:
    """A running process that forks ranks, under one interpreter and one environment."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking.settimeout(_READY_WITHIN_S)
        self._codes: dict[int, int] = {}
        with theirs:
            self._process = subprocess.Popen(
                settled(("-", "-", "-"), (python, *TRAINER, "--nursery", str(theirs.fileno()))),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._under = (python, dict(environment))

    def serves(self, python: str, environment: Mapping[str, str]) -> bool:
        """Whether it lives, and its ranks are what this interpreter would start in this environment."""
        return self._under == (python, dict(environment)) and self._process.poll() is None

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
        asked = {
            "settles": list(settles),
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(folder),
            "handed": list(handed),
        }
        try:
            socket.send_fds(self._asking, [json.dumps(asked).encode()], [*output, *handed.values()])
            while "code" in (told := self._next()):
                self._codes[told["pid"]] = told["code"]
        except OSError as error:
            raise NurseryLostError(f"no rank could be forked: {error}") from None
        return ForkedRank(told["pid"], self)

    def exit_code(self, pid: int, *, wait: bool) -> int | None:
        """How a rank ended; None while it runs, unless it is waited for."""
        self._asking.settimeout(None if wait else 0.0)
        try:
            while pid not in self._codes:
                told = self._next()
                self._codes[told["pid"]] = told["code"]
        except BlockingIOError:
            return None
        except OSError:
            self._codes[pid] = -signal.SIGKILL  # ranks do not outlive the process that they were forked from
        finally:
            self._asking.settimeout(_READY_WITHIN_S)
        return self._codes[pid]

    def _next(self) -> dict[str, Any]:
        message = self._asking.recv(_MESSAGE_BYTES)
        if not message:
            raise NurseryLostError("it has ended")
        told: dict[str, Any] = json.loads(message)
        return told

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
