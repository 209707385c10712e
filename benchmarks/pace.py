"""How fast this machine is at the moment: one piece of work, timed again and again beside what a benchmark measures.

A virtual machine becomes slower or faster by a tenth, or by a third, for minutes, and a prediction knows of no other
moment than that of its probe. Beside each trial all cores multiply and attend for half a second, before and after; what
a trial took at the probe's pace is its time by what that work took around the probe over what it took around the trial.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.nn import functional

from trimaran.bench.sweep import Progress
from trimaran.nouns.measurement import Measurement
from trimaran.probe.alone import Operands
from trimaran.probe.probe_settings import ProbedProduct
from trimaran.protocol.host import usable_cores

LOOK_S = 0.5
_SIDE = 512


class Pace:
    """Looks at the machine's pace, kept in a file by what they were taken beside, so that none is lost."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._of: dict[str, float] = {}
        if file.exists():
            self._of = dict(json.loads(line) for line in file.read_text().splitlines())
        self._works = [self._work() for _ in range(usable_cores())]
        torch.set_num_threads(1)
        self._before = math.nan

    def _work(self) -> Callable[[], object]:
        device = torch.device("cpu")
        product = Operands(device).product(ProbedProduct(m=_SIDE, n=_SIDE, k=_SIDE), torch.float32)
        q = torch.randn(1, 2, _SIDE, 64)

        def run() -> None:
            for _ in range(4):
                product()
            functional.scaled_dot_product_attention(q, q, q, is_causal=True)

        return run

    def look(self) -> float:
        """Seconds of the work now, of all cores at once."""

        def seconds(run: Callable[[], object]) -> float:
            begin, runs = time.perf_counter(), 0
            while (past := time.perf_counter() - begin) < LOOK_S:
                run()
                runs += 1
            return past / runs

        with ThreadPoolExecutor(len(self._works)) as threads:
            return statistics.fmean(threads.map(seconds, self._works))

    def begin(self) -> None:
        """What is measured begins now."""
        self._before = self.look()

    def end(self, of: str) -> None:
        """It has ended: its pace is the mean of both looks."""
        self._of[of] = (self._before + self.look()) / 2.0
        with self._file.open("a") as kept:
            kept.write(json.dumps((of, self._of[of])) + "\n")

    def follow(self, event: Progress, number: int) -> None:
        """Look where a trial of a sweep's round begins and where it ends."""
        if event.happening == "started":
            self.begin()
        elif event.happening == "finished" and event.measurement is not None:
            self.end(_trial(event.measurement, number))

    def seconds(self, rows: Sequence[Measurement], probe: str) -> list[float]:
        """What each round's trial of a layout took, at the pace of that probe."""
        at_probe = self._of[probe]
        return [
            (row.sec_per_it or math.nan) * at_probe / self._of[_trial(row, number)] for number, row in enumerate(rows)
        ]


def _trial(row: Measurement, number: int) -> str:
    return f"{row.layout_label}, round {number + 1}"


def repeats(seconds: Sequence[float]) -> float:
    """By how many per cent the longest is above the shortest."""
    return 100 * (max(seconds) / min(seconds) - 1)
