"""Trials under way: one in the sweep's thread, or several side by side, each in its thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from trimaran.nouns.measurement import Measurement

Work = Callable[[], Measurement]


class Crew:
    """Runs up to `at_once` works. Where that is 1, `begin` returns when it is done: no thread then delays Ctrl-C."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._pool = ThreadPoolExecutor(at_once) if at_once > 1 else None
        self._under_way: dict[str, Future[Measurement]] = {}

    @property
    def full(self) -> bool:
        """Whether another work would have to wait."""
        return len(self._under_way) >= self._at_once

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and nothing finished was left."""
        return not self._under_way

    def begin(self, key: str, work: Work) -> None:
        """Start a work. Raises what the work raises where there is one at a time."""
        if self._pool:
            self._under_way[key] = self._pool.submit(work)
        else:
            done: Future[Measurement] = Future()
            done.set_result(work())
            self._under_way[key] = done

    def finished(self) -> Iterator[tuple[str, Measurement]]:
        """Results not given before, one by one. Raises what a work raised, after the results of the others."""
        done = [(key, future) for key, future in self._under_way.items() if future.done()]
        for key, future in sorted(done, key=lambda entry: entry[1].exception() is not None):
            del self._under_way[key]
            yield key, future.result()

    def wait(self, at_most_s: float) -> None:
        """Wait until one more is finished."""
        wait(self._under_way.values(), timeout=at_most_s, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Wait for all that is under way."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
