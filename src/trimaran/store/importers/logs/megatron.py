"""Logs of Megatron-LM and Megatron-DeepSpeed: `iteration 2/ 95 | ... | elapsed time per iteration (s): 769.99 |`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from trimaran.nouns.columns import Cell
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.logs.deepspeed import is_engine_setting
from trimaran.store.importers.logs.steps import LogReading, Step, drafts_of, mixture, optimizer_cell, stated_cell

_ITERATION = re.compile(r"\biteration\s{1,9}(\d{1,9})\s?/\s{0,9}(?:\d{1,9}|infinity)\s*\|")
_FIELD = re.compile(r"\s*([A-Za-z][^|:]{1,60}?)\s*:\s*([-+.\w]{1,40})\s*$")
# `  hidden_size ..................................... 14336`, perhaps behind a rank's prefix
_ARGUMENT = re.compile(r"\b([a-z][a-z0-9_]{1,60}) \.{3,60} (\S{1,60})\s*$")
_VOCAB = re.compile(r"padded vocab \(size: (\d{1,9})\)")
_WORLD = re.compile(r"using world size: (\d{1,8}), data-parallel[- ]size: (\d{1,8}), ")
_MEMORY = re.compile(r"\[Rank (\d{1,7})\][^|]{0,80}memory \(MB\) \|.{0,200}\bmax reserved: (\d{1,9}(?:\.\d{1,9})?)")

_COLUMNS = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn_hidden",
    "num_attention_heads": "heads",
    "num_query_groups": "kv_heads",
    "seq_length": "seq_len",
    "padded_vocab_size": "vocab",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "data_parallel_size": "dp",
    "world_size": "devices",
    "micro_batch_size": "mbs",
    "global_batch_size": "gbs",
    "zero_stage": "zero_stage",
}
# Values of `num_experts` that stand for a dense model.
_DENSE = ("None", "0", "1", "[1]")
_PRECISIONS = {"torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32"}


def recognises(text: str) -> bool:
    """Whether the text holds lines of Megatron's training log, or its arguments where no step was reached."""
    return any(
        ("elapsed time per iteration" in line and _ITERATION.search(line))
        or ("tensor_model_parallel_size ..." in line and _ARGUMENT.search(line))
        for line in text.split("\n")
    )


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The rows of one log. Both print the same line, DeepSpeed's in seconds with `TFLOPs`."""
    lines = text.split("\n")
    reading = LogReading()
    arguments: dict[str, str] = {}
    for at, line in enumerate(lines):
        if (step := _step(line)) is not None:
            reading.steps.append(step)
            reading.after = at + 1
        elif not is_engine_setting(line) and (argument := _ARGUMENT.search(line)):
            arguments[argument[1]] = argument[2]
        elif vocab := _VOCAB.search(line):
            reading.cells["vocab"] = int(vocab[1])
        elif world := _WORLD.search(line):
            reading.cells |= {"devices": int(world[1]), "dp": int(world[2])}
        elif memory := _MEMORY.search(line):
            rank, gib = int(memory[1]), float(memory[2]) / 1024.0
            reading.mem_gib_by_rank[rank] = max(gib, reading.mem_gib_by_rank.get(rank, 0.0))
    reading.cells |= _settings(arguments)
    experts = arguments.get("num_experts", "None")
    if experts not in _DENSE:
        reading.refusal = mixture("num_experts", experts)
    elif any("| load_balancing_loss:" in line for line in lines):
        reading.refusal = mixture("load_balancing_loss", "logged")
    deepspeed = arguments.get("deepspeed") == "True" or any("elapsed time per iteration (s)" in line for line in lines)
    reading.guesses["stack"] = "megatron-deepspeed" if deepspeed else "megatron"
    reading.formula = "" if deepspeed else "model_flops"
    if reading.mem_gib_by_rank:
        reading.notes.append("memory is the most that PyTorch had reserved")
    return drafts_of(reading, lines, given)


def times_by_tflops(lines: Iterable[str]) -> dict[float, float]:
    """Seconds of the log lines among `lines`, by the TFLOPs that each prints."""
    steps = [step for step in map(_step, lines) if step is not None]
    return {s.tflops: s.sec_per_it for s in steps if s.tflops is not None and s.sec_per_it is not None}


def _step(line: str) -> Step | None:
    match = _ITERATION.search(line)
    if match is None:
        return None
    fields = {}
    for part in line[match.end() :].split("|")[:-1]:  # behind the last bar stands nothing, or what was cut off
        if pair := _FIELD.match(part):
            fields[pair[1]] = pair[2]
    seconds, milliseconds = _number(fields, "elapsed time per iteration (s)"), None
    if seconds is None:
        milliseconds = _number(fields, "elapsed time per iteration (ms)")
        seconds = None if milliseconds is None else milliseconds / 1000.0
    gbs, tflops = _number(fields, "global batch size"), _number(fields, "TFLOPs")
    return Step(
        iteration=int(match[1]),
        sec_per_it=seconds,
        gbs=None if gbs is None else int(gbs),
        loss=_number(fields, "lm loss" if "lm loss" in fields else "lm-loss"),
        tflops=_number(fields, "throughput per GPU (TFLOP/s/GPU)") if tflops is None else tflops,
    )


def _number(fields: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(fields[name])
    except (KeyError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _settings(arguments: Mapping[str, str]) -> dict[str, Cell]:
    cells = {column: stated_cell(column, arguments[name]) for name, column in _COLUMNS.items() if name in arguments}
    cells["optimizer"] = optimizer_cell(arguments.get("optimizer"))
    cells["precision"] = _PRECISIONS.get(arguments.get("params_dtype", ""))
    cells["recompute"] = _recompute(arguments)
    if arguments.get("group_query_attention") == "False":
        cells["kv_heads"] = None
    interleaved = isinstance(cells.get("vpp"), int) and arguments.get("virtual_pipeline_model_parallel_size") != "None"
    cells["vpp"] = cells.get("vpp") if interleaved else None
    if arguments.get("use_distributed_optimizer") == "True":
        cells["zero_stage"] = 1
    return {name: value for name, value in cells.items() if value is not None}


def _recompute(arguments: Mapping[str, str]) -> str | None:
    granularity, checkpointed = arguments.get("recompute_granularity"), arguments.get("checkpoint_activations")
    if granularity in ("full", "selective"):
        return granularity
    if checkpointed == "True":
        return "full"
    return "none" if "None" in (granularity, checkpointed) or checkpointed == "False" else None
