"""A training that is asked to leave: its ranks are asked, and what is saved is said."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from trimaran.bench.launch.contract import Launch, Launcher, Ranks
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.exits import STOPPED
from trimaran.protocol.wishes import Wishes, stop_signals

GO_ON = "the same command with --resume goes on"
BEGIN_ANEW = "nothing was saved yet, so the same command begins at the first step"


class TrainingStoppedError(TrimaranError):
    """A training that was told to leave, and did; the same command with --resume goes on."""

    exit_status = STOPPED


class StoppedBetweenRanksError(BaseException):
    """A signal to leave while there are no ranks to pass it on to, as while they wait in a queue."""


class StoppableLauncher:
    """A launcher whose ranks are asked to leave when this process is; what goes on, goes on from a checkpoint.

    `devices` are those of this machine that ranks may use, where not all.
    """

    at_once = 1
    restarts = 0  # a start anew goes on from a checkpoint, of which a launcher knows nothing

    def __init__(self, inner: Launcher) -> None:
        self._inner = inner
        self._ranks: Ranks | None = None
        self.on_this_machine, self.tells_groups = inner.on_this_machine, inner.tells_groups
        self.job = inner.job
        self.stopping = False
        self.waited_s = 0.0  # until the ranks could be started
        self.devices: tuple[int, ...] | None = None

    def expect(self, nodes: int) -> None:
        """Tell the launcher."""
        self._inner.expect(nodes)

    def nodes_left(self) -> int | None:
        """What the launcher says."""
        return self._inner.nodes_left()

    def has_nodes(self, nodes: int) -> bool:
        """What the launcher says."""
        return self._inner.has_nodes(nodes)

    def start(self, launch: Launch) -> Ranks:
        """Start the ranks on the devices of a node that they may use, and remember them."""
        begin = time.monotonic()
        self._ranks = self._inner.start(replace(launch, devices=self.devices))
        self.waited_s = time.monotonic() - begin
        return self._ranks

    def node_of(self, rank: int) -> str | None:
        """The machine that a rank runs on, where that is known."""
        return None if self._ranks is None else self._ranks.node_of(rank)

    def ended(self) -> None:
        """There are no ranks until others are started."""
        self._ranks = None

    def ask_to_leave(self) -> None:
        """Have the ranks save and leave, where there are any."""
        if self._ranks is not None:
            self._ranks.ask_to_leave()

    def close(self) -> None:
        """Give back what the launcher holds."""
        self._inner.close()

    @contextlib.contextmanager
    def passing_on_signals(self) -> Iterator[None]:
        """Send the ranks SIGTERM on any of `stop_signals`; a second wish does here what it did before.

        Raises StoppedBetweenRanksError where there are no ranks.
        """
        before: dict[int, Any] = {}
        wishes = Wishes()

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def pass_on(number: int, _frame: FrameType | None) -> None:
            if not wishes.is_new():
                return
            if self.stopping:
                restore()
                signal.raise_signal(number)
                return
            self.stopping = True
            if self._ranks is None:
                raise StoppedBetweenRanksError
            self._ranks.ask_to_leave()

        if threading.current_thread() is threading.main_thread():
            before.update({number: signal.signal(number, pass_on) for number in stop_signals()})
        try:
            yield
        finally:
            restore()
