"""The history of a run at Weights & Biases as it is exported: a CSV, a JSON object a line, or a JSON list of them.

`run.history()` and `scan_history()` give a column `_step`, which counts what was logged, `_timestamp` and `_runtime` in
seconds; a chart's export has `Step` and columns like `run-name - train/loss`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping

from trimaran.nouns.columns import Cell
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.json_text import json_object, number_in
from trimaran.store.importers.logs.steps import LogReading, drafts_of
from trimaran.store.importers.logs.tracked import OWN_STEPS, Point, drafts_of_points, names_in
from trimaran.store.importers.text import number_of

_STEPS = ("_step", "Step")
_CLOCKS = ("_timestamp", "_runtime")
_BOUNDS = ("__MIN", "__MAX")


def recognises(text: str) -> bool:
    """Whether the text is such an export."""
    head = text.lstrip()[:1]
    if head in ("{", "["):
        first = {name for fields in _objects(text, 1) for name in fields}
        return "_wandb" not in first and (
            "_step" in first or (bool(first & {*OWN_STEPS}) and names_in(first) is not None)
        )
    names = [name for _, name in _columns(text)]
    steps = any(name in (*_STEPS, *OWN_STEPS) for name in names)
    return steps and names_in(names) is not None and not {"layers", "hidden", "mbs"} <= set(names)


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The row of one run, by the steps that the trainer counted where it tracked them."""
    rows: list[Mapping[str, object]]
    if text.lstrip()[:1] in ("{", "["):
        rows = list(_objects(text))
    else:
        columns = _columns(text)
        runs = sorted({run for run, _ in columns if run})
        if len(runs) > 1:
            refusal = f"it holds {len(runs)} runs ({', '.join(runs[:3])}): export one at a time"
            return drafts_of(LogReading(refusal=refusal), (), given)
        names = [name for _, name in columns]
        try:
            lines = list(csv.reader(io.StringIO(text)))[1:]
        except csv.Error as error:
            return drafts_of(LogReading(refusal=f"it is no CSV ({error}): export it again"), (), given)
        rows = [
            {name: number for name, cell in zip(names, line, strict=False) if (number := number_of(cell)) is not None}
            for line in lines
        ]
    return drafts_of_points([point for row in rows if (point := _point(row)) is not None], given)


def _point(row: Mapping[str, object]) -> Point | None:
    own = next((step for name in OWN_STEPS if (step := number_in(row, name)) is not None), None)
    step = own if own is not None else next((s for name in _STEPS if (s := number_in(row, name)) is not None), None)
    if step is None or not 0 <= step < 1e9:
        return None
    clock = next((at for name in _CLOCKS if (at := number_in(row, name)) is not None), None)
    return Point(int(step), row, counted=own is not None, clock=clock)


def _objects(text: str, most: int | None = None) -> Iterator[dict[str, object]]:
    """The objects of a list, or of lines; at `most` so many."""
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except (ValueError, RecursionError):
            return
        yield from [item for item in items if isinstance(item, dict)][:most]
        return
    found = (fields for line in text.split("\n") if (fields := json_object(line)))
    for number, fields in enumerate(found):
        if number == most:
            return
        yield fields


def _columns(text: str) -> list[tuple[str, str]]:
    """Run and name of each column; those of bounds, which a chart's export has beside, have no name."""
    head = next(csv.reader(io.StringIO(text.lstrip("\n").split("\n", 1)[0])), [])
    split = [cell.strip().rpartition(" - ")[::2] for cell in head]
    return [("", "") if name.endswith(_BOUNDS) else (run, name) for run, name in split]
