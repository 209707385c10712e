"""The watch of a trial looks at its ranks' files often, and where a look takes long less often."""

from __future__ import annotations

import time
from pathlib import Path

from trimaran.bench.launch.contract import Launch
from trimaran.bench.launch.local import LocalRanks
from trimaran.bench.watch.limits import Limits
from trimaran.bench.watch.watch import watch


class FarRanks(LocalRanks):
    """One rank, whose files are as slow to look at as those of a thousand on a network file system."""

    def __init__(self, look_s: float) -> None:
        super().__init__(None)
        self.looks, self._look_s = 0, look_s

    def exit_codes(self) -> tuple[int | None, ...]:
        self.looks += 1
        time.sleep(self._look_s)
        return (None,)


def test_looks_take_half_of_the_time_at_most(tmp_path: Path) -> None:
    """Looks at a thousand ranks came one upon the other: the server of their files had nothing else to do."""
    ranks, begin = FarRanks(0.2), time.monotonic()
    ending = watch(ranks, Launch((), 1, tmp_path), Limits(timeout_s=2.0, start_s=60.0), lambda step: None)
    assert ending.cause == "timeout"
    busy_s = ranks.looks * 0.2
    assert busy_s <= 0.5 * (time.monotonic() - begin) + 0.4, "the last look is at how the ranks ended"
