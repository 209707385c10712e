"""Where a training's time went, in the parts of a forecast, and what the closed form makes of its faults."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from trimaran.nouns.noun import Noun
from trimaran.planner.goodput.expected import Faulty, expected
from trimaran.study.training.events import LONGEST_S, Event, EventKind

# What ends a start of the ranks without being asked for.
FAULTS = frozenset({EventKind.CRASH, EventKind.HANG, EventKind.FAIL, EventKind.LOST, EventKind.OOM, EventKind.TIMEOUT})
_STARTS = frozenset({EventKind.BEGAN, EventKind.WENT_ON})
# The parts of a training's time, and what each is.
LEGEND = {
    "work": "steps that were kept",
    "checkpoints": "the training stood still while its state was copied",
    "lost": "steps that had to be made again",
    "restarts": "from the last step before a fault to the first step after it",
    "waiting": "until ranks could be started, as in a queue",
    "other": "first starts, validation, the end",
}


class Parts(Noun):
    """Seconds of a training's life, as LEGEND names them."""

    work: float
    checkpoints: float
    lost: float
    restarts: float
    waiting: float
    other: float

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return sum(self.seconds().values())

    def seconds(self) -> dict[str, float]:
        """Seconds by part."""
        return {part: getattr(self, part) for part in LEGEND}

    def shares(self) -> dict[str, float]:
        """Shares of the whole by part."""
        total_s = self.total_s or 1.0
        return {part: seconds / total_s for part, seconds in self.seconds().items()}


def seconds_between(first: str, last: str) -> float:
    """Seconds from one time of a row to another."""
    return (datetime.datetime.fromisoformat(last) - datetime.datetime.fromisoformat(first)).total_seconds()


def sessions(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each command that trained: a training that was stopped, and gone on with, has more than one."""
    found: list[list[Event]] = []
    for event in events:
        if event.event == EventKind.BEGAN or not found:
            found.append([])
        found[-1].append(event)
    return found


def measured(events: Sequence[Event], step_s: Sequence[float], last_sign: str) -> Parts:
    """Where the time went, from the rows of events.csv and the seconds of the steps that were kept.

    The time between a session and the next counts for nothing. `last_sign` is when the log was last written to, the end
    of a training that still runs.
    """
    total_s = 0.0
    every = sessions(events)
    for number, session in enumerate(every):
        first, last = session[0].at, session[-1].at
        runs = number + 1 == len(every) and session[-1].event not in (EventKind.FINISHED, EventKind.STOPPED)
        total_s += seconds_between(first, max(last, last_sign) if runs else last)
    work_s = sum(step_s)
    went_on = [event for event in events if event.event == EventKind.WENT_ON]
    waited_s = sum(event.waited_s or 0.0 for event in went_on)
    # the first step after a fault is seen when it is made, and counts as work or as lost
    a_step_s = fmean(step_s) if step_s else 0.0
    down_s = sum(max(0.0, (event.seconds or 0.0) - (event.waited_s or 0.0) - a_step_s) for event in went_on)
    lost_s = sum(event.lost_s or 0.0 for event in events)
    saved_s = sum(event.seconds or 0.0 for event in events if event.event == EventKind.SAVED)
    known_s = work_s + saved_s + lost_s + down_s + waited_s
    other_s = max(0.0, total_s - known_s)
    return Parts(work=work_s, checkpoints=saved_s, lost=lost_s, restarts=down_s, waiting=waited_s, other=other_s)


def predicted(events: Sequence[Event], found: Parts) -> Parts | None:
    """What planner/goodput expects of a training of as much work whose steps meet as many faults a second.

    A fault that struck while ranks began has lengthened a restart, and is none beside it: a restart takes what restarts
    took here in the mean, with what they waited, and a checkpoint what checkpoints did. How many faults there are and
    how much is lost follows from the closed form. First starts of sessions, and those on more devices, are of no fault
    and stand apart. None where faults come so fast that nothing ends.
    """
    saved = sum(event.event == EventKind.SAVED for event in events)
    restarts = sum(event.event == EventKind.WENT_ON for event in events)
    grown = sum(event.event == EventKind.GROWN for event in events)
    # of faults in a row the first alone struck steps; the row may end the training, or still be gone on from
    in_rows = [event.event in FAULTS for event in events if event.event in FAULTS | _STARTS]
    faults = sum(fault and not before for before, fault in pairwise([False, *in_rows]))
    steps_s = found.work + found.lost + found.checkpoints
    if not found.work:
        return None
    down_s = found.restarts + found.waiting
    a_restart_s = down_s / restarts if restarts else 0.0
    known = expected(
        Faulty(
            work_s=found.work,
            rate=faults / steps_s,
            every_s=found.work / max(1, saved),
            save_s=found.checkpoints / saved if saved else 0.0,
            detect_s=a_restart_s,
            restart_s=0.0,
        )
    )
    if not known.total_s < LONGEST_S:
        return None
    return Parts(
        work=known.work_s,
        checkpoints=known.checkpoints_s,
        lost=known.lost_s,
        restarts=known.restarts_s * (found.restarts / down_s if down_s else 1.0),
        waiting=known.restarts_s * (found.waiting / down_s if down_s else 0.0),
        other=a_restart_s * (len(sessions(events)) + grown),
    )
