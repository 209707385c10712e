"""Progress bars as tqdm prints them, `795/77225 [9:07:58<878:01:48, 41.36s/it`: steps by the time that has elapsed."""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.store.importers.logs.steps import Step

# What a bar says has elapsed, to stand in a format's own pattern.
ELAPSED = r"((?:\d{1,4}:)?\d{1,2}:\d\d)<"
_UNIT_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
BAR_NOTE = "times from the progress bar, to a whole second"
# So many of a bar's whole seconds tell the mean time of what was made in them to a tenth, and many such means to less.
_TELLS_S = 10


def seconds_of(elapsed: str) -> int:
    """Seconds of `9:07:58` or `07:58`."""
    seconds = 0
    for part in elapsed.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds


def seconds_in_words(elapsed: str) -> int:
    """Seconds of `1d 9h 7m 58s`, or of the last of them."""
    return sum(int(part[:-1]) * _UNIT_S[part[-1]] for part in elapsed.split())


def steps_of(clock: Mapping[int, int], begun: float = 0) -> list[Step]:
    """Steps by the seconds at which a bar counted to each; it counted on from `begun` at 0 s.

    The first has a time of its own, with the start-up in it. Behind it a time is the mean since the last one, which a
    step has where enough of the bar's whole seconds have passed to tell it, or at the end where no step has.
    """
    steps: list[Step] = []
    since, timed = (begun, 0), 0
    for done in sorted(clock):
        if done <= begun:
            since = (done, clock[done])
            continue
        passed = clock[done] - since[1]
        if passed < 0:  # the clock of a bar that was started again
            since = (done, clock[done])
            steps.append(Step(done))
            continue
        took = passed / (done - since[0]) if passed > 0 and (not steps or passed >= _TELLS_S) else None
        if took is not None or not steps:
            since, timed = (done, clock[done]), timed + bool(steps)
        steps.append(Step(done, took))
    last = steps[-1].iteration if steps else 0
    if not timed and last > since[0] and clock[last] > since[1]:
        steps[-1] = Step(last, (clock[last] - since[1]) / (last - since[0]))
    return steps
