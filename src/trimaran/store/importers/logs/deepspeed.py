"""Logs of DeepSpeed: the dump of its configuration, and the lines of its engine's timers."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from trimaran.nouns.columns import Cell
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.json_text import json_object
from trimaran.store.importers.logs.steps import LogReading, Step, drafts_of_trainings, optimizer_cell, parts_of
from trimaran.store.importers.text import clock_of, loss_of

# `[2021-05-25 06:38:26,359] [INFO] [config.py:752:print]   train_batch_size ............. 64`, and without dots where
# the name leaves them no room: `train_micro_batch_size_per_gpu  4`; the JSON below is since 2022 of
# a function of its own
_SETTING = re.compile(
    r"\[config\.py:\d{1,5}:print(?:_user_config)?\]\s{1,9}([a-z]\w{1,60})(?: \.{1,40})? {1,9}(\S.{0,4000})$"
)
_MOST_JSON_LINES = 2000
# What Python's JSON calls otherwise; accelerate prints a line every `inf` steps.
_INFINITE = re.compile(r":\s?inf\b")
# The optimizer that the engine was given, where its configuration has none.
_BASIC = re.compile(r"\bDeepSpeed Basic Optimizer = (\w{1,60})")
# What ZeRO keeps elsewhere, with the deprecated name of each; the first includes the second.
_OFFLOADS = (("offload_param", "cpu_offload_param", "weights"), ("offload_optimizer", "cpu_offload", "optimizer"))
_STAGE = re.compile(r"\bstage[\"']?[=:] ?(\d)\b")
# ZeRO++: a second copy of weights within a node, and what is sent in 8 or 4 bit; no word of the table says either.
_PLUS_PLUS = re.compile(r"\b(zero_hpz_partition_size=(?!1\b)\d{1,7}|zero_quantized_(?:weights|gradients)=True)")
# `epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=25.0, CurrSamplesPerSec=25.7, ...`; until December 2022
# `0/40, ...` of epoch and micro-step, whose rate is that of one micro-step
_STEP = re.compile(r"(?:\bglobal_step=|:stop\] (\d{1,6}/))(\d{1,9}), .{0,80}CurrSamplesPerSec=(\d{1,9}(?:\.\d{1,20})?)")
_PROGRESS = re.compile(r"\] step=(\d{1,9}), skipped=")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\]")
# Rates are of single steps and the clock is of all, with what stands between them: so far apart they may be.
_FURTHEST = 1.5
_MEMORY = re.compile(r"MaxMemAllocated=(\d{1,6}(?:\.\d{1,6})?)GB")
_PIPELINE = re.compile(r"\bsteps: (\d{1,9}) loss: (\S{1,30}) iter time \(s\): (\d{1,9}\.\d{1,9})")


def is_engine_setting(line: str) -> bool:
    """Whether a line is of the configuration's dump, whose `world_size` is that of one data-parallel group."""
    return "[config.py:" in line and ":print" in line


def recognises(text: str) -> bool:
    """Whether the text holds the dump of DeepSpeed's configuration, or lines of its engine's timer."""
    return any(
        (is_engine_setting(line) and "train_micro_batch_size_per_gpu" in line)
        or ("CurrSamplesPerSec=" in line and _STEP.search(line))
        for line in text.split("\n")
    )


def settings(lines: Sequence[str]) -> dict[str, Cell]:
    """The cells that the configuration's dump states, and the JSON that it ends with."""
    stated: dict[str, str] = {}
    config: dict[str, Any] = {}
    for at, line in enumerate(lines):
        if is_engine_setting(line) and (setting := _SETTING.search(line)):
            stated[setting[1]] = setting[2].rstrip()
            config = _json_below(lines, at) if setting[1] == "json" else config
        elif "Basic Optimizer" in line and (basic := _BASIC.search(line)):
            stated["basic_optimizer"] = basic[1]
    # ranks that share a sequence are no replicas; whether those that share tensors are counted as such, no line says
    sequences, tensors = config.get("sequence_parallel_size"), _within(config, "tensor_parallel", "autotp_size")
    world = stated.get("world_size", "").removesuffix(".0")
    stage = stated.get("zero_optimization_stage") or _found(_STAGE, stated.get("zero_config", ""))
    cells: dict[str, Cell] = {
        "gbs": _count(stated.get("train_batch_size")),
        "mbs": _count(stated.get("train_micro_batch_size_per_gpu")),
        "dp": None if _many(tensors) else _count(world),
        "tp": _many(tensors),
        "cp": _many(sequences),
        "cp_kind": "ulysses" if _many(sequences) else None,
        "zero_stage": _count(stage),
        "optimizer": optimizer_cell(stated.get("optimizer_name"))
        or optimizer_cell(str(_within(config, "optimizer", "type")))
        or optimizer_cell(stated.get("basic_optimizer")),
        "precision": _precision(stated, config),
        "offload": _offload(config) if stage not in (None, "0") else None,
        "dp_kind": _found(_PLUS_PLUS, stated.get("zero_config", "")) if stage == "3" else None,
        "shard": (_count(stated.get("mics_shard_size")) or None) if stage == "3" else None,
    }
    return {name: value for name, value in cells.items() if value is not None}


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The rows of one log, which may hold several trainings.

    A step takes the batch over the samples a second of its own, and not of all since the last. Source: DeepSpeed,
    `ThroughputTimer.stop` in `deepspeed/utils/timer.py`.
    """
    lines = text.split("\n")
    parts = parts_of(lines, is_engine_setting, _made)
    return drafts_of_trainings([_reading_of(part, begin, given) for begin, part in parts], lines, given)


def _made(line: str) -> object:
    """Whether a line is of a step."""
    return ("iter time" in line and _PIPELINE.search(line)) or ("CurrSamplesPerSec=" in line and _STEP.search(line))


def _reading_of(lines: Sequence[str], begin: int, given: Mapping[str, Cell]) -> LogReading:
    """What some lines of a log, from `begin` on, say of one training."""
    reading = LogReading(cells=settings(lines), begin=begin, after=begin)
    batch = reading.cells.get("gbs") or given.get("gbs")
    gbs = batch if isinstance(batch, int) else None
    progress = None
    clocked: list[
        tuple[float, int, float]
    ] = []  # of the timer's lines: when, how many steps were made, samples a second
    for at, line in enumerate(lines):
        seconds, loss, step = None, None, None
        if pipeline := _PIPELINE.search(line):
            number, seconds, loss = int(pipeline[1]), float(pipeline[3]), loss_of(pipeline[2])
        elif step := _STEP.search(line):
            number, rate = int(step[2]), float(step[3])
            # where micro-steps were counted, a step was one of them if the engine counts as many steps
            if gbs and rate and (not step[1] or number == progress):
                seconds = gbs / rate
            if step[1] and progress:
                number = progress
            reading.sampled = True
            if (clock := clock_of(_STAMP.search(line))) is not None and not step[1]:
                clocked.append((clock, number, rate))
            if memory := _MEMORY.search(line):
                reading.mem_gib_by_rank[0] = max(float(memory[1]), reading.mem_gib_by_rank.get(0, 0.0))
        elif engine := _PROGRESS.search(line):
            progress = int(engine[1])
            continue
        else:
            continue
        reading.after = begin + at + 1
        _add(Step(number, seconds, gbs, loss), reading, by_steps=not (step and step[1]))
    if gbs and (samples := _samples_a_step(clocked)):
        says = f"gbs is {gbs}, but by the log's clock and its samples a second a step has about {samples:.3g}"
        if gbs > _FURTHEST * samples:
            reading.refusal = f"{says}: correct --set gbs"
        elif samples > _FURTHEST * gbs:
            reading.suspect = f"{says}: gbs is wrong, or the times leave out what else took that long"
    return reading


def _add(step: Step, reading: LogReading, by_steps: bool) -> None:
    """A step, where steps are counted and not micro-steps but once, and without the start-up of a further start."""
    last = reading.steps[-1].iteration if reading.steps and by_steps else -1
    if step.iteration == last:
        return  # another rank's line, or the one step more that a further start made
    if step.iteration < last:
        reading.notes.append(f"started again before iteration {step.iteration}")
        step = replace(step, sec_per_it=None)
    reading.steps.append(step)


def _samples_a_step(clocked: Sequence[tuple[float, int, float]]) -> float | None:
    """How many samples a step has by the rates and by the clock, whose time has data and evaluations in it too."""
    found = [
        rate * (clock - before) / (number - number_before)
        for (before, number_before, _), (clock, number, rate) in pairwise(clocked)
        if number > number_before and clock > before
    ]
    return statistics.median(found) if found else None


def _json_below(lines: Sequence[str], at: int) -> dict[str, Any]:
    """The object that begins behind `json = ` and ends where a line is its last brace; its lines are indented.

    A launcher may have put its host before each of them, and other ranks lines between them.
    """
    stamp = _STAMP.search(lines[at])
    prefix = lines[at][: stamp.start()] if stamp else ""
    body = ["{"]
    for line in lines[at + 1 : at + _MOST_JSON_LINES]:
        bare = line.removeprefix(prefix).rstrip()
        if bare == "}":
            return json_object(_INFINITE.sub(": Infinity", "\n".join([*body, bare])))
        if bare.startswith("  "):
            body.append(bare)
    return {}


def _within(config: Mapping[str, Any], section: str, name: str) -> object:
    inside = config.get(section)
    return inside.get(name) if isinstance(inside, dict) else None


def _offload(config: Mapping[str, Any]) -> str | None:
    """What lies in the host's memory; another place than that stays as its word, by which the row is refused."""
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    for name, deprecated, word in _OFFLOADS:
        device = "cpu" if zero.get(deprecated) is True else _within(zero, name, "device")
        if device not in (None, "none"):
            return word if device == "cpu" else str(device)
    return None


def _precision(stated: Mapping[str, str], config: Mapping[str, Any]) -> str | None:
    halves = {"bf16": ("bfloat16_enabled", "bf16_enabled"), "fp16": ("fp16_enabled",)}
    for precision, names in halves.items():
        enabled = _within(config, precision, "enabled") is True
        if enabled or any(stated.get(name) == "True" for name in names):
            return precision
    # neither is enabled: the engine then trains in the model's own type, which it does not print
    return None


def _found(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match else None


def _many(size: object) -> int | None:
    """How many ranks share something, where they are several."""
    return size if isinstance(size, int) and size > 1 else None


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else None
