"""What a study's training measured of its faults: how soon they were noticed, and how long restarts and saves took."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from trimaran.files.user_file import MIB, read_text
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.goodput.recovery import Recovery
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob, read_job
from trimaran.study.training.events import EVENTS, FAULTS, Event, EventKind, events_of, seconds_between

_MOST_BYTES = 256 * MIB


def recovery_in(training: Path, model: Model) -> Recovery | None:
    """What the training in the folder measured, where it is of this model; None where nothing can be read of one."""
    path = training.with_name(EVENTS)
    if not path.is_file():
        return None
    with contextlib.suppress(TrimaranError):
        job = read_job(TrainJob, RunFile.JOB.of(training))
        if job.workload.model == model:
            events, _ = events_of(read_text(path, f"events {path}", _MOST_BYTES, "a training writes them"), str(path))
            return recovery_of(events, str(path))
    return None


def recovery_of(events: Sequence[Event], source: str) -> Recovery | None:
    """Medians of a training's rows; None where nothing was saved, nor started again.

    Of faults that struck one after the other, before a step was made, none says how long a restart takes.
    """
    struck, noticed_s, restarts_s = list[Event](), list[float](), list[float]()
    for event in events:
        if event.event in FAULTS:
            struck.append(event)
        elif event.event in (EventKind.BEGAN, EventKind.NOT_RUN, EventKind.GROWN):
            struck.clear()
        elif event.event == EventKind.WENT_ON:
            if len(struck) == 1 and event.seconds is not None:
                waited_s = event.waited_s or 0.0
                restart_s = max(0.0, seconds_between(struck[0].at, event.at) - waited_s)
                restarts_s.append(restart_s)
                noticed_s.append(max(0.0, event.seconds - waited_s - restart_s))
            struck.clear()
    saves_s = [event.seconds for event in events if event.event == EventKind.SAVED and event.seconds is not None]
    if not restarts_s and not saves_s:
        return None
    return Recovery(
        source=source,
        restarts=len(restarts_s),
        detect_s=median(noticed_s) if noticed_s else None,
        restart_s=median(restarts_s) if restarts_s else None,
        saves=len(saves_s),
        save_s=median(saves_s) if saves_s else None,
    )
