"""Scalars of TensorBoard: event files, the CSV of one scalar (`Wall time,Step,Value`), or several as JSON by tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimaran.nouns.columns import Cell
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.event_file import CLOCK, START, STEP
from trimaran.store.importers.json_text import json_object, number_in
from trimaran.store.importers.logs.steps import LogReading, Step, drafts_of
from trimaran.store.importers.logs.tracked import Point, drafts_of_points

_EVENTS = f'{{"{START}": '
_HEADER = "Wall time,Step,Value"
# Tags by what they hold: Megatron's own, of which its repository keeps exports for its tests.
_TIMES, _LOSSES = ("iteration-time",), ("lm loss",)
_MEMORIES = ("mem-max-allocated-bytes",)


def recognises(text: str) -> bool:
    """Whether the text is an export of scalars, or what event files hold."""
    return text.startswith(_EVENTS) or text.startswith(_HEADER) or bool(_series(json_object(text), (*_TIMES, *_LOSSES)))


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The row of one run. Shape, batch and layout stand in no scalar: the user states them."""
    if text.startswith(_EVENTS):
        return drafts_of_points([point for line in text.split("\n") if (point := _point(line))], given)
    reading = LogReading(sampled=True)
    if text.startswith(_HEADER):
        _by_clock(text.split("\n")[1:], reading)
        return drafts_of(reading, (), given)
    scalars = json_object(text)
    times, losses = _series(scalars, _TIMES), _series(scalars, _LOSSES)
    reading.steps = [
        Step(number, times.get(number), loss=losses.get(number)) for number in sorted(times.keys() | losses.keys())
    ]
    if memory := _series(scalars, _MEMORIES):
        reading.mem_gib_by_rank[0] = max(memory.values()) / 2**30
        reading.notes.append("memory is the most that PyTorch had allocated")
    return drafts_of(reading, (), given)


def _point(line: str) -> Point | None:
    fields = json_object(line)
    step, clock, start = (number_in(fields, name) for name in (STEP, CLOCK, START))
    if step is None or not 0 <= step < 1e9:
        return None
    return Point(int(step), fields, clock=clock, start=int(start or 0))


def _by_clock(lines: Sequence[str], reading: LogReading) -> None:
    """Times by the clock of a scalar's points. What its values are, only the name of the file says."""
    before: tuple[int, float] | None = None
    for line in lines:
        cells = line.split(",")
        try:
            clock, number = float(cells[0]), int(float(cells[1]))
        except (ValueError, IndexError, OverflowError):
            continue
        if before is None or number > before[0]:
            took = None if before is None else (clock - before[1]) / (number - before[0])
            reading.steps.append(Step(number, took if took and 0 < took < 1e9 else None))
            before = (number, clock)
    reading.sampled = False
    reading.notes.append("times by the clock of the points, evaluations and checkpoints included")


def _series(scalars: Mapping[str, Any], tags: Sequence[str]) -> dict[int, float]:
    """One tag's values by step."""
    for tag in tags:
        values = scalars.get(tag)
        points = values.get("values", values) if isinstance(values, dict) else {}
        if isinstance(points, dict):
            found = {int(step): value for step in points if step.isdecimal() and len(step) < 10
                     if (value := number_in(points, step)) is not None}  # fmt: skip
            if found:
                return found
    return {}
