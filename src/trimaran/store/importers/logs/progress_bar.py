"""Progress bars as tqdm prints them, `795/77225 [9:07:58<878:01:48, 41.36s/it`: steps by the time that has elapsed."""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.store.importers.logs.steps import Step

# What a bar says has elapsed, to stand in a format's own pattern.
ELAPSED = r"((?:\d{1,4}:)?\d{1,2}:\d\d)<"
BAR_NOTE = "times from the progress bar, to a whole second"


def seconds_of(elapsed: str) -> int:
    """Seconds of `9:07:58` or `07:58`."""
    seconds = 0
    for part in elapsed.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds


def steps_of(clock: Mapping[int, int], begun: float = 0) -> list[Step]:
    """Steps by the seconds at which a bar counted to each; it counted on from `begun` at 0 s."""
    steps, before = [], (begun, 0)
    for done in sorted(clock):
        if done > before[0]:
            took = (clock[done] - before[1]) / (done - before[0])
            steps.append(Step(done, took if took > 0 else None))
        before = (done, clock[done])
    return steps
