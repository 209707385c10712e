"""The summary that Weights & Biases keeps of a run: `wandb-summary.json`, one object with the last of each metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trimaran.nouns.columns import Cell
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.json_text import json_object, number_in
from trimaran.store.importers.logs.steps import LogReading, Step, drafts_of
from trimaran.store.importers.logs.tracked import OWN_STEPS, last_step, names_in

_RUNTIMES = ("train/train_runtime", "train_runtime", "_runtime")
_LOSSES = ("train/loss", "train_loss", "loss", "train/CE loss")
_DURATIONS = ("throughput/duration", "perf/step_time", "train/step_time")


def recognises(text: str) -> bool:
    """Whether the text is the summary of a run."""
    return '"_wandb"' in text and {"_wandb", "_step"} <= json_object(text).keys()


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The run's row. Shape, batch and layout stand in no summary: the user states them."""
    summary = json_object(text)
    reading = LogReading()
    own, duration = _first(summary, OWN_STEPS), _first(summary, _DURATIONS)
    number, trainer = own if own is not None else _first(summary, ("_step",)), names_in(set(summary))
    # the tracker's own step may count what was tracked
    counted = own is not None or (trainer is not None and (trainer.mark or trainer.loss) in summary)
    runtime = _first(summary, _RUNTIMES)
    tracked, memory = last_step(0, summary, trainer) if trainer is not None else (Step(0), 0.0)
    last = duration or tracked.sec_per_it
    seconds = last or (runtime / number if runtime and number and counted else None)
    if last:
        reading.notes.append("the time of the last step that was tracked")
    elif seconds:
        reading.notes.append(f"the mean over {number:.0f} steps, start-up and evaluations included")
    if number is not None and 0 <= number < 1e9:
        loss = tracked.loss if tracked.loss is not None else _first(summary, _LOSSES)
        reading.steps.append(replace(tracked, iteration=int(number), sec_per_it=seconds, loss=loss))
        reading.mem_gib_by_rank[0] = memory
    return drafts_of(reading, (), given)


def _first(summary: Mapping[str, object], names: tuple[str, ...]) -> float | None:
    return next((value for name in names if (value := number_in(summary, name)) is not None), None)
