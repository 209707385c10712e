"""Logs of nanoGPT: `iter 20: loss 2.7697, time 894.88ms, mfu 16.67%`, and the settings that its configurator prints.

Those of build-nanogpt too: `step    1 | loss: 9.650049 | lr 1.2000e-04 | norm: 13.1 | dt: 2890.59ms | tok/sec: 181377`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trimaran.nouns.columns import Cell
from trimaran.nouns.precision import BY_DTYPE
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.logs.steps import LogReading, Step, drafts_of_trainings, stated_cell
from trimaran.store.importers.text import loss_of

_STEP = re.compile(r"\biter (\d{1,9}): loss ([-+.\w]{1,20}), time (\d{1,9}(?:\.\d{1,6})?)ms\b")
_BUILT = re.compile(
    r"\bstep\s{0,6}(\d{1,9}) \| loss: ([-+.\w]{1,20}) \|.{0,80}?\bdt: (\d{1,9}(?:\.\d{1,6})?)ms \| tok/sec"
)
# Both evaluate ahead of an iteration, whose time begins before that.
_EVALUATION = re.compile(
    r"\bstep \d{1,9}: train loss [-+.\w]{1,20}, val loss |\bvalidation loss: \d|\bHellaSwag accuracy: "
)
# of all processes and accumulated micro-batches
_TOKENS = re.compile(r"\b(?:tokens per iteration will be|total desired batch size): ([\d,]{1,20})")
_VOCAB = re.compile(r"\bfound vocab_size = (\d{1,9})\b|\bdefaulting to vocab_size of GPT-2 to (\d{1,9})\b")
# `Overriding: n_layer = 4`, and the lines of a configuration file, which is printed whole (configurator.py)
_SETTING = re.compile(
    r"(?:^|\bOverriding: |\s)(n_layer|n_head|n_embd|block_size|batch_size|dtype) = ['\"]?(\w{1,20})['\"]?\s*(?:#.*)?$"
)
_COLUMNS = {"n_layer": "layers", "n_head": "heads", "n_embd": "hidden", "block_size": "seq_len", "batch_size": "mbs"}


def recognises(text: str) -> bool:
    """Whether the text holds lines of nanoGPT's training."""
    return any("loss" in line and _line_of_step(line) for line in text.split("\n"))


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The rows of one log, which may hold several trainings.

    A time is that since the iteration before (train.py, `dt`), so that one ahead of which the model is evaluated, and
    kept, has the time of that in it and is left out.
    """
    lines = text.split("\n")
    trainings = [LogReading(sampled=True)]
    tokens: list[int | None] = [None]
    evaluated = False
    for at, line in enumerate(lines):
        reading = trainings[-1]
        if step := _line_of_step(line):
            number, seconds = int(step[1]), float(step[3]) / 1000.0
            if reading.steps and number <= reading.steps[-1].iteration:
                trainings.append(LogReading(sampled=True, begin=at))
                tokens.append(None)
                reading = trainings[-1]
            reading.steps.append(Step(number, None if evaluated else seconds, loss=loss_of(step[2])))
            reading.after, evaluated = at + 1, False
        elif _EVALUATION.search(line):
            evaluated = True
        elif (count := _TOKENS.search(line)) or (setting := _SETTING.search(line)) or (vocab := _VOCAB.search(line)):
            if reading.steps:
                trainings.append(LogReading(sampled=True, begin=at, after=at))
                tokens.append(None)
                reading = trainings[-1]
            if count:
                digits = count[1].replace(",", "")
                tokens[-1] = int(digits) if digits else None
            elif setting:
                _set(setting[1], setting[2], reading)
            elif vocab:
                reading.cells["vocab"] = int(vocab[1] or vocab[2])
    for reading, each in zip(trainings, tokens, strict=True):
        length = reading.cells.get("seq_len", given.get("seq_len"))
        if each and isinstance(length, int) and length > 0 and each % length == 0:
            reading.cells["gbs"] = each // length
    return drafts_of_trainings(trainings, lines, given)


def _line_of_step(line: str) -> re.Match[str] | None:
    return _STEP.search(line) or _BUILT.search(line)


def _set(name: str, value: str, reading: LogReading) -> None:
    if name == "dtype":
        if value in BY_DTYPE:
            reading.cells["precision"] = BY_DTYPE[value]
    elif value.isdecimal():
        reading.cells[_COLUMNS[name]] = stated_cell(_COLUMNS[name], value)
