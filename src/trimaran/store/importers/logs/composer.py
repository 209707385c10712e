"""Logs of Composer, as LLM Foundry's: `[batch=5/100]:`, then lines like `Train throughput/samples_per_sec: 2.7330`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

from trimaran.nouns.columns import Cell
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.logs.steps import (
    LogReading,
    Step,
    drafts_of_trainings,
    mixture,
    optimizer_cell,
    stated_cell,
)
from trimaran.store.importers.text import loss_of, number_of

# How far a training is, in the unit of its duration; a dataset of unknown length has no end
# (composer/loggers/console_logger.py, _get_progress_string).
_BATCH = re.compile(
    r"\[(?:epoch=(\d{1,9})(?:/\d{1,9})?\]\[)?(batch|sample|token|iteration|second)=(\d{1,18})(?:/(\d{1,18}))?\]:"
)
_METRIC = re.compile(r"\bTrain ([\w/]{1,80}): ([-+.\w]{1,30})\s*$")
# `  d_model: 768`, as LLM Foundry prints its configuration (scripts/train/train.py), and Composer's own beside it
_SETTING = re.compile(r"(?:^|\s)([a-z]\w{1,50}): (\S{1,80})\s*$")
_COLUMNS = {
    "d_model": "hidden",
    "n_heads": "heads",
    "n_layers": "layers",
    "max_seq_len": "seq_len",
    "vocab_size": "vocab",
    "global_train_batch_size": "gbs",
    "num_nodes": "nodes",
    "num_gpus_per_node": "devices_per_node",
    "data_parallel_shard_degree": "shard",
}
_PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "fp32", "amp_fp8": "fp8"}
_WORDS: dict[tuple[str, str], dict[str, Cell]] = {
    ("sharding_strategy", "FULL_SHARD"): {"zero_stage": 3, "dp_kind": "fully_sharded"},
    ("sharding_strategy", "SHARD_GRAD_OP"): {"zero_stage": 2, "dp_kind": "fully_sharded"},
    ("sharding_strategy", "NO_SHARD"): {"zero_stage": 0, "dp_kind": "all_reduce"},
    ("activation_checkpointing", "true"): {"recompute": "full"},
    ("activation_checkpointing", "false"): {"recompute": "none"},
}
# Weights are shared out within a node, unless a degree is stated (torch/distributed/fsdp, ShardingStrategy).
_HYBRIDS = {"HYBRID_SHARD": 3, "_HYBRID_SHARD_ZERO2": 2}
_LOSS = "loss/train/total"
_GIB_PER_GB = 1e9 / 2**30


def recognises(text: str) -> bool:
    """Whether the text holds batches of Composer's console logger."""
    return _BATCH.search(text) is not None and any(
        "Train " in line and _METRIC.search(line) for line in text.split("\n")
    )


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The rows of one log, which may hold several trainings.

    The time of a step where it is printed; else samples a step and samples a second give the mean over the window of
    its speed monitor, without evaluations (composer/callbacks/speed_monitor.py).
    """
    lines = text.split("\n")
    trainings = [LogReading()]
    batches: list[dict[str, float]] = []
    before = (0, 0)  # epoch and batch in it
    for at, line in enumerate(lines):
        reading = trainings[-1]
        if batch := _BATCH.search(line):
            place = int(batch[1] or 1), int(batch[3])
            if batches and place <= before:
                _finish(reading, batches)
                trainings.append(LogReading(begin=at))
                reading, batches = trainings[-1], []
            before, reading.after = place, at + 1
            in_batches = batch[2] == "batch" and batch[4] is not None
            reading.planned = int(batch[4]) if in_batches and not batch[1] else None
            batches.append({"": (place[0] - 1) * int(batch[4]) + place[1]} if in_batches else {})
        elif metric := _METRIC.search(line):
            value = loss_of(metric[2]) if metric[1] == _LOSS else number_of(metric[2])
            if batches and value is not None:
                batches[-1][metric[1]] = value
                reading.after = at + 1
        elif (setting := _SETTING.search(line)) and (stated := _stated(setting[1], setting[2])):
            if batches:
                _finish(reading, batches)
                trainings.append(LogReading(begin=at, after=at))
                reading, batches = trainings[-1], []
            for name, cell in stated.items():
                reading.cells.setdefault(name, cell)
        elif setting and setting[1] == "ffn_type" and "moe" in setting[2]:
            reading.mixture = mixture(setting[1], setting[2])
    _finish(trainings[-1], batches)
    for reading in trainings:
        hidden, ratio = reading.cells.get("hidden"), reading.cells.pop("expansion", None)
        if isinstance(hidden, int) and isinstance(ratio, int):
            reading.cells["ffn_hidden"] = hidden * ratio
        stage = reading.cells.pop("hybrid", None)
        shard = reading.cells.pop("shard", reading.cells.get("devices_per_node", given.get("devices_per_node")))
        if stage is not None and shard is not None:
            reading.cells |= {"zero_stage": stage, "dp_kind": "fully_sharded", "shard": shard}
    return drafts_of_trainings(trainings, lines, given)


def _finish(reading: LogReading, batches: list[dict[str, float]]) -> None:
    """Make steps of the batches that were logged."""
    counts = _samples_a_batch(batches)
    samples = reading.cells.get("gbs") if not counts else counts.pop() if len(counts) == 1 else None
    if counts:
        reading.notes.append("batches had other numbers of samples, so that samples a second tell no time of a step")
    smoothed = False
    number = 0
    for at in batches:
        # batches that were done before are counted among the figures
        number = int(at.get("", at.get("time/batch", number) + 1))
        rate = at.get("throughput/samples_per_sec")
        seconds: float | None = at.get("time/secs_per_step") or None
        if seconds is None and rate and isinstance(samples, int):
            seconds, smoothed = samples / rate, True
        mbs, device_rate = at.get("trainer/device_train_microbatch_size"), at.get("throughput/device/samples_per_sec")
        if mbs and mbs.is_integer():
            reading.cells["mbs"] = int(mbs)
        if rate and device_rate:
            reading.cells.setdefault("devices", round(rate / device_rate))
        if memory := at.get("memory/peak_reserved_mem"):
            reading.mem_gib_by_rank[0] = max(memory * _GIB_PER_GB, reading.mem_gib_by_rank.get(0, 0.0))
        reading.steps.append(
            Step(
                number, seconds, samples if isinstance(samples, int) else None, at.get(_LOSS),
                tokens_per_s_per_device=at.get("throughput/device/tokens_per_sec"),
            )
        )  # fmt: skip
    reading.sampled = True
    if smoothed:
        reading.notes.append("each time is the mean over the window of the speed monitor, so that they overlap")
    nodes, per_node = reading.cells.get("nodes"), reading.cells.get("devices_per_node")
    if isinstance(nodes, int) and isinstance(per_node, int):
        reading.cells["devices"] = nodes * per_node


def _samples_a_batch(batches: list[dict[str, float]]) -> set[int]:
    """How many samples a batch had, by samples and batches that were done before; more than one where it changed."""
    counted = [
        (0.0, 0.0),
        *((at["time/batch"], at["time/sample"]) for at in batches if {"time/batch", "time/sample"} <= at.keys()),
    ]
    ways = [
        (samples - before) / (done - done_before)
        for (done_before, before), (done, samples) in pairwise(counted)
        if done > done_before
    ]
    return {int(way) for way in ways if way > 0}


def _stated(name: str, value: str) -> dict[str, Cell]:
    """What a line of the configuration states."""
    if name in _COLUMNS:
        return {_COLUMNS[name]: stated_cell(_COLUMNS[name], value)} if value.isdecimal() else {}
    if name == "expansion_ratio":
        return {"expansion": int(value[:9])} if value.isdecimal() else {}
    if name == "sharding_strategy" and value in _HYBRIDS:
        return {"hybrid": _HYBRIDS[value]}
    if name == "precision":
        return {"precision": _PRECISIONS[value]} if value in _PRECISIONS else {}
    if name == "name":
        return {"optimizer": optimizer_cell(value)} if "adam" in value else {}
    return _WORDS.get((name, value), {})
