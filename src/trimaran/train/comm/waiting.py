"""How long a rank waits for others, which tells a slow rank from those that wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

# A rank that waits longer than this for the others has lost them. The harness that started the
# ranks notices sooner, by their heartbeats.
RENDEZVOUS_TIMEOUT = timedelta(minutes=30)


class WaitClock:
    """Adds up the seconds that a rank stands in collectives, or waits for a tensor of its pipeline.

    On a GPU it is the time for which the stream of the computing stands still, by an event before and behind each wait;
    the host itself does not wait there.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self._seconds = 0.0
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that the block takes."""
        if self._on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._waits.append((begin, end))
        else:
            since = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - since

    def take(self) -> float:
        """Seconds since this was last asked. The device must have done all it was given."""
        on_stream_s = 1e-3 * sum(float(begin.elapsed_time(end)) for begin, end in self._waits)
        seconds, self._seconds = self._seconds + on_stream_s, 0.0
        self._waits.clear()
        return seconds
