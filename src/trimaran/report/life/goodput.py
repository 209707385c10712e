"""Where a training's time went, in the parts of a forecast, and what the closed form makes of its faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from trimaran.nouns.noun import Noun
from trimaran.study.training.events import FAULTS, Event, EventKind, seconds_between
from trimaran.study.training.lasting import wait_s

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


def sessions(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each command that trained: a training that was stopped, and gone on with, has more than one."""
    found: list[list[Event]] = []
    for event in events:
        if event.event == EventKind.BEGAN or not found:
            found.append([])
        found[-1].append(event)
    return found


def measured(events: Sequence[Event], step_s: Sequence[float], last_sign: str) -> Parts:
    """Where the time went, from the rows of events.csv and the seconds of the steps that stand in the log.

    Those that the last fault undid stand there until ranks make them again, and are lost, not work. The time between a
    session and the next counts for nothing. `last_sign` is when the log was last written to, the end of a training
    that still runs.
    """
    total_s = 0.0
    every = sessions(events)
    for number, session in enumerate(every):
        first, last = session[0].at, session[-1].at
        runs = number + 1 == len(every) and session[-1].event not in (EventKind.FINISHED, EventKind.STOPPED)
        total_s += seconds_between(first, max(last, last_sign) if runs else last)
    work_s = max(0.0, sum(step_s) - _undone_s(events))
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


def predicted(events: Sequence[Event], found: Parts, step_s: Sequence[float], snapshot_seconds: float) -> Parts | None:
    """What is expected of a training of as much work that meets as many faults, by what was known before them.

    Known are the seconds of its steps (`step_s`, those that were kept) and of a checkpoint, its first start, and for
    how long a fault may go unnoticed.
    What is lost follows from the closed form of planner/goodput, at the rate that makes as many faults strike steps,
    with as many checkpoints refused; where nodes hold snapshots, these are `snapshot_seconds` apart. Each fault goes
    unnoticed for as long as is stated, and each start anew takes as long as the first one did; one that a fault ends,
    half of it. Only faults by which nodes, or what serves the ranks, were lost have their place in a queue again.
    Faults in a row are waited between, as lasting.py does.

    None where no first step is known, or no step was kept.
    """
    first = [event for event in events if event.event == EventKind.FIRST_STEP]
    # what was lost is known to the millisecond
    if not first or not step_s or found.work < 0.5 * fmean(step_s):
        return None
    in_queue_s = fmean(event.waited_s or 0.0 for event in first)
    start_s = max(0.0, fmean(event.seconds or 0.0 for event in first) - in_queue_s - fmean(step_s))
    struck = _struck(events)
    in_steps, in_starts = (sum(one.is_fault and one.in_start is such for one in struck) for such in (False, True))
    lost = sum(one.event.event == EventKind.LOST for one in struck)
    grown = sum(event.event == EventKind.GROWN for event in events)
    saved = sum(event.event == EventKind.SAVED for event in events)
    not_saved = sum(event.event == EventKind.NOT_SAVED for event in events)
    kept, not_kept = float(max(1, saved)), not_saved
    if snapshot_seconds and any(_held(one.event) for one in struck):
        kept, not_kept = max(kept, found.work / snapshot_seconds), 0
    return Parts(
        work=found.work,
        checkpoints=found.checkpoints,
        lost=_lost_s(found, in_steps, kept, not_kept),
        restarts=sum(one.event.seconds or 0.0 for one in struck) + start_s * (in_steps + grown + in_starts / 2),
        waiting=in_queue_s * (lost + grown) + _waits_s(struck),
        other=(start_s + in_queue_s) * sum(any(map(_made_steps, session)) for session in sessions(events)),
    )


def _undone_s(events: Sequence[Event]) -> float:
    """Seconds of the steps that were lost since ranks last began to make steps."""
    last = max((index for index, event in enumerate(events) if _made_steps(event)), default=len(events))
    return sum(event.lost_s or 0.0 for event in events[last + 1 :] if event.event != EventKind.BAD_LOSS)


def _made_steps(event: Event) -> bool:
    """Whether it says that the ranks of a command made a step; one that is killed before that has no time at all."""
    return event.event in (EventKind.FIRST_STEP, EventKind.WENT_ON)


@dataclass(frozen=True)
class _Struck:
    """What ended ranks, or kept them from being started, and whether these had made no step yet."""

    event: Event
    in_start: bool

    @property
    def is_fault(self) -> bool:
        """Whether ranks had been started."""
        return self.event.event in FAULTS


def _struck(events: Sequence[Event]) -> list[_Struck]:
    found, in_start = [], True
    for event in events:
        if event.event in FAULTS | {EventKind.NOT_RUN}:
            found.append(_Struck(event, in_start))
        if event.event in FAULTS | {EventKind.BEGAN, EventKind.GROWN}:
            in_start = True
        elif event.event in (EventKind.FIRST_STEP, EventKind.WENT_ON):
            in_start = False
    return found


def _held(fault: Event) -> bool:
    """Whether what was kept as it struck is newer than any checkpoint."""
    return fault.lost_steps is not None and fault.step - fault.lost_steps > fault.saved_step


def _lost_s(found: Parts, faults: int, saved: float, not_saved: int) -> float:
    """Seconds of steps that are made again, at the rate r by which the closed form expects as many faults.

    By its exp(r L) - 1 = faults (1 - q) / checkpoints, for stretches of L seconds of which a share q is not saved. The
    tries of stretches then take faults / r in all, and those that are kept are the work and the checkpoints.
    """
    if not faults:
        return 0.0
    refused = not_saved / (saved + not_saved)
    grows = faults * (1.0 - refused) / saved
    stretches = saved / (1.0 - refused / (1.0 + grows))
    kept_s = found.work + found.checkpoints
    return faults * kept_s / (stretches * math.log1p(grows)) - kept_s


def _waits_s(struck: Sequence[_Struck]) -> float:
    """What a training waits between starts in vain."""
    total_s, in_vain = 0.0, 0
    for one in struck:
        in_vain = in_vain + 1 if one.in_start else 0
        total_s += wait_s(in_vain)
    return total_s
