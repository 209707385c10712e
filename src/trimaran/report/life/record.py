"""What the folder of a training says of it, as plain data for its page and for a terminal."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from trimaran.files.user_file import MIB, NOUN_BYTES, read_bytes, read_text
from trimaran.nouns.noun import LARGEST, Noun, TrimaranError, first_error
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob
from trimaran.protocol.steps_log import standing
from trimaran.report.life.goodput import LEGEND, Parts, measured, predicted
from trimaran.store.importers.json_text import json_object, number_in
from trimaran.study.training.events import EVENTS, FAULTS, LONGEST_S, Event, EventKind, events_of, seconds_between
from trimaran.study.training.folders import events_of_folder

# Points that a curve is drawn from.
POINTS = 2000
# A line has less than a kilobyte: millions of steps.
LOG_BYTES = 4096 * MIB
# What is read of each line of the log: whether it may be missing or null, and between which numbers it is.
NEEDED = {
    "sec_per_it": (False, 1e-12, LONGEST_S),
    "tokens_per_s": (False, 0.0, LARGEST),
    "lm_loss": (True, -math.inf, math.inf),
    "validation_loss": (True, -math.inf, math.inf),
}


class Life(Noun):
    """A training's life. Curves are (step, value) pairs; `progress` and `marks` have hours since it began.

    `marks` are what happened, checkpoints left out, and `saved` the checkpoints: hours and step.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    sentences: tuple[str, ...]
    losses: tuple[tuple[int, float], ...]
    validations: tuple[tuple[int, float], ...]
    speeds: tuple[tuple[int, float], ...]
    progress: tuple[tuple[float, int], ...]
    saved: tuple[tuple[float, int], ...]
    marks: tuple[dict[str, str | int | float | None], ...]
    measured: dict[str, float]
    predicted: dict[str, float]
    legend: dict[str, str] = LEGEND


def training_folder(path: Path) -> Path | None:
    """The folder of a training that a path names, be it that folder or its workspace; None where it is neither."""
    # resolved, since a training's other files lie beside its folder, which may be named as `.`
    return next((folder.resolve() for folder in (path, path / "train") if RunFile.LOG.of(folder).exists()), None)


def life_of(folder: Path) -> Life:
    """The life of the training in `folder`. Raises TrimaranError naming the file that cannot be read."""
    job = _job(RunFile.JOB.of(folder))
    log = RunFile.LOG.of(folder)
    records, cut_steps = _steps(log)
    if not records:
        raise TrimaranError(f"training {folder}: {log.name} has no step yet")
    events, cut_events = _events(events_of_folder(folder))
    last_sign = datetime.datetime.fromtimestamp(log.stat().st_mtime, datetime.UTC).isoformat(timespec="milliseconds")
    step_s = [record["sec_per_it"] for record in records]
    parts = measured(events, step_s, last_sign)
    planned = predicted(events, parts, step_s, job.train.snapshot_seconds)
    begin = events[0].at
    return Life(
        title=f"Training of {folder.resolve().parent.name}",
        facts=tuple(_facts(job, records, events)),
        sentences=(*_sentences(records, events, parts, planned), *_gaps(cut_steps, cut_events)),
        losses=_curve(records, "lm_loss"),
        validations=_curve(records, "validation_loss"),
        speeds=_curve(records, "tokens_per_s"),
        progress=tuple((_hours(begin, event), event.step) for event in events),
        saved=tuple((_hours(begin, event), event.step) for event in events if event.event == EventKind.SAVED),
        marks=tuple(
            {"hours": _hours(begin, event), **event.model_dump(mode="json")}
            for event in events
            if event.event != EventKind.SAVED
        ),
        measured=parts.seconds(),
        predicted=planned.seconds() if planned else {},
    )


def life_lines(life: Life) -> str:
    """The same for a terminal: facts, sentences, and the parts of the time."""
    lines = [life.title, *(f"  {name}: {value}" for name, value in life.facts), *life.sentences]
    totals = [sum(parts.values()) or 1.0 for parts in (life.measured, life.predicted)]
    lines.append(f"{'part of the time':18}{'measured':>20}{'predicted':>20}")
    for part in LEGEND:
        cells = [
            f"{_time(parts[part])} {parts[part] / total:6.1%}" if parts else "unknown"
            for parts, total in zip((life.measured, life.predicted), totals, strict=True)
        ]
        lines.append(f"{part:18}{cells[0]:>20}{cells[1]:>20}")
    return "\n".join(lines)


def _facts(job: TrainJob, records: Sequence[dict[str, Any]], events: Sequence[Event]) -> Iterator[tuple[str, str]]:
    model = job.workload.model
    yield "Model", f"{model.layers} layers, hidden {model.hidden}"
    yield "Layout", ", then ".join(dict.fromkeys(event.layout for event in events))
    yield "Steps", f"{records[-1]['iteration']:,} of {job.train.steps:,}"
    counts = Counter(event.event for event in events if event.event in FAULTS)
    yield "Faults", ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "none"
    saved, not_saved = (sum(event.event == kind for event in events) for kind in (EventKind.SAVED, EventKind.NOT_SAVED))
    yield "Checkpoints", f"{saved}, and {not_saved} could not be written" if not_saved else str(saved)


def _sentences(
    records: Sequence[dict[str, Any]], events: Sequence[Event], parts: Parts, planned: Parts | None
) -> Iterator[str]:
    total_s = parts.total_s
    said = f"{parts.work / total_s:.1%} of {_time(total_s)} was work that is kept"
    if planned is not None:
        said += f"; {planned.work / planned.total_s:.1%} is expected of as many faults, by the closed form"
    yield f"{said}."
    losses = [record["lm_loss"] for record in records if record.get("lm_loss") is not None]
    speed = median(record["tokens_per_s"] for record in records)
    if losses:
        yield f"Loss goes from {losses[0]:.3f} to {losses[-1]:.3f} nats a token, at {speed:,.0f} tokens a second."
    else:
        yield f"No step has a finite loss, at {speed:,.0f} tokens a second."
    last = events[-1]
    faults = [event for event in events if event.event in FAULTS]
    if faults:
        where = f" on node {faults[-1].node}" if faults[-1].node else ""
        yield f"The last fault, at step {faults[-1].step}{where}: {faults[-1].why or faults[-1].event}."
    slow = [event for event in events if event.event == EventKind.SLOW]
    if slow:
        where = f" on node {slow[-1].node}" if slow[-1].node else ""
        yield f"Slow at step {slow[-1].step}: rank {slow[-1].rank}{where}, {slow[-1].why}."
    yield f"Last event: {last.event} at step {last.step}, {last.at[:19].replace('T', ' ')} UTC."


def _gaps(steps: int, events: int) -> Iterator[str]:
    """What was cut off in the midst of the files, as where a disk was full, and is missing here."""
    if steps:
        yield f"Lines of the log that cannot be read: {steps:,}; their steps are left out, and count as other time."
    if events:
        yield f"Rows of {EVENTS} that cannot be read: {events:,}; what they told of is left out."


def _job(path: Path) -> TrainJob:
    try:
        return TrainJob.model_validate_json(read_text(path, f"job {path}", NOUN_BYTES, "a training writes it"))
    except ValidationError as error:
        raise TrimaranError(f"job {path}: {first_error(error)}") from None


def _steps(log: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that stand, and how many cannot be read; the last one may be cut off, as by a kill."""
    records: list[dict[str, Any]] = []
    cut = 0
    *lines, _ = read_bytes(log, f"log {log}", LOG_BYTES).decode(errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        record = json_object(line)
        if not record:
            cut += 1
        elif _is_step(record):
            records.append(record)
        else:
            raise TrimaranError(f"log {log}: line {number} is not of a training's log")
    return [records[place] for place in standing([record["iteration"] for record in records])], cut


def _is_step(record: dict[str, Any]) -> bool:
    iteration = record.get("iteration")
    if type(iteration) is not int or not 0 < iteration < LARGEST:
        return False
    for name, (may_miss, least, most) in NEEDED.items():
        if may_miss and record.get(name) is None:
            continue
        number = number_in(record, name)
        if number is None or not least <= number < most:
            return False
    return True


def _events(path: Path) -> tuple[list[Event], int]:
    text = read_text(path, f"events {path}", LOG_BYTES, "a training writes them")
    events, cut = events_of(text, f"events {path}")
    if not events:
        raise TrimaranError(f"events {path} has no row: the training has not begun")
    return events, cut


def _curve(records: Sequence[dict[str, Any]], name: str) -> tuple[tuple[int, float], ...]:
    known = [(record["iteration"], record[name]) for record in records if record.get(name) is not None]
    return tuple(known[:: -(-len(known) // POINTS) or 1])


def _hours(begin: str, event: Event) -> float:
    return seconds_between(begin, event.at) / 3600.0


def _time(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5940 else f"{seconds / 3600:.1f} h"
