"""Signals as wishes: one that comes twice in a moment is one wish.

A terminal sends Ctrl-C to all its processes, and what runs a command for somebody (uv run, make, a container's init)
passes it on besides; a person presses it twice.
"""

from __future__ import annotations

import math
import signal
import time

# Who wants to end what is being ended presses once more after this time.
SAME_WISH_S = 0.5


def stop_signals() -> tuple[signal.Signals, ...]:
    """What asks a training to save and leave so.

    Schedulers send the first two, Ctrl-C the third, and a terminal that is gone the last, which nohup has ignored.
    """
    asked = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*asked, signal.SIGHUP)


class Wishes:
    """Tells a new wish from one that was just heard."""

    def __init__(self) -> None:
        self._heard_at = -math.inf

    def is_new(self) -> bool:
        """Whether a signal that has come now is a wish of its own."""
        now = time.monotonic()
        if now - self._heard_at < SAME_WISH_S:
            return False
        self._heard_at = now
        return True
