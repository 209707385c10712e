"""Logs of nanotron: `iteration: 991 / 1000 | ... | elapsed_time_per_iteration_ms: 45 | tokens_per_sec: 14.2K | ...`.

Since 2025 the time is `time_per_iteration_ms`, beside which the global batch is in tokens (src/nanotron/trainer.py,
train_step_logs).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from trimaran.nouns.columns import Cell
from trimaran.nouns.precision import BY_DTYPE
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.logs.steps import (
    LogReading,
    Step,
    drafts_of_trainings,
    mixture,
    optimizer_cell,
    parts_of,
    stated_cell,
)

_ITERATION = re.compile(r"iteration: (\d{1,9}) / (\d{1,9}) \|")
_FIELD = re.compile(r"\s*([a-z_]{2,60}): ([-+.\deE]{1,30})([KMGBT]?)\s*$")
_SETTING = re.compile(
    r"\b(num_hidden_layers|hidden_size|intermediate_size|num_attention_heads|num_key_value_heads|vocab_size"
    r"|sequence_length|micro_batch_size|zero_stage|context_parallel_size|dp|pp|tp)=(\d{1,9})\b"
)
_WORD = re.compile(
    r"\b(dtype=torch\.\w{1,20}|recompute_layer=(?:True|False)|name='(?:adam|sgd)\w{0,20}'"
    r"|accumulate_grad_in_fp32=False|(?:OneForwardOneBackward|AllForwardAllBackward)PipelineEngine)"
)
# Words that say something only beside others: of a pipeline, of weights in 16 bit.
_ENGINES = {"OneForwardOneBackwardPipelineEngine": "1f1b", "AllForwardAllBackwardPipelineEngine": "gpipe"}
_SUMS_NARROW = "accumulate_grad_in_fp32=False"
_WORDS: dict[str, dict[str, Cell]] = {
    **{f"dtype=torch.{dtype}": {"precision": precision} for dtype, precision in BY_DTYPE.items()},
    "recompute_layer=False": {"recompute": "none"},
    "recompute_layer=True": {"recompute": "full"},
}
_EXPERTS = re.compile(r"\b(expert_parallel_size|num_local_experts|moe_num_experts)=(\d{1,6})\b")
# What a training says of its batch, in sequences; until 2025 behind `[Start training]`, and in another order.
_START = re.compile(r"\bmbs: \d{1,9} \| grad_accum: \d{1,9} \|")
_STARTED = re.compile(r"\b(mbs|cp|global_batch_size|sequence_length): (\d{1,9})(?= \||\s*$)")
_STARTED_COLUMNS = {"mbs": "mbs", "cp": "cp", "global_batch_size": "gbs", "sequence_length": "seq_len"}
_RESERVED = re.compile(r"\bPeak reserved: (\d{1,9}(?:\.\d{1,6})?)MiB")
_TIME, _TIME_TODAY = "elapsed_time_per_iteration_ms", "time_per_iteration_ms"
_LOST = re.compile(r"\blm_loss: (?:nan|-?inf)\b")
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_COLUMNS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "intermediate_size": "ffn_hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocab",
    "sequence_length": "seq_len",
    "micro_batch_size": "mbs",
    "zero_stage": "zero_stage",
    "context_parallel_size": "cp",
    "dp": "dp",
    "pp": "pp",
    "tp": "tp",
}


def recognises(text: str) -> bool:
    """Whether the text holds lines of nanotron's training log, or its config where no step was reached."""
    return any(
        (f"{_TIME_TODAY}:" in line and _ITERATION.search(line)) or "ParallelismArgs(" in line
        for line in text.split("\n")
    )


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The rows of one log, which may hold several trainings.

    Its figures have three digits, and so has what is drawn from them. A time is of its iteration alone.
    """
    lines = text.split("\n")
    readings = [
        _reading_of(part, begin)
        for begin, part in parts_of(lines, _begins, lambda line: "iteration: " in line and _ITERATION.search(line))
    ]
    return drafts_of_trainings(readings, lines, given)


def _begins(line: str) -> bool:
    """Whether a training tells of its start: it prints its config, or says what it is about to do."""
    return "ParallelismArgs(" in line or "[Start training]" in line or _START.search(line) is not None


def _reading_of(lines: Sequence[str], begin: int) -> LogReading:
    """What some lines of a log, from `begin` on, say of one training."""
    reading = LogReading(formula="model_flops", notes=["figures are printed to three digits"], begin=begin, after=begin)
    reading.sampled = True
    iterations: set[int] = set()
    words: set[str] = set()
    for at, line in enumerate(lines):
        match = _ITERATION.search(line)
        if match is None:
            words |= _settings(line, reading)
            continue
        fields = _fields(line[match.end() :])
        if reserved := fields.get("cuda_max_memory_reserved"):
            reading.mem_gib_by_rank[0] = max(reserved / 2**30, reading.mem_gib_by_rank.get(0, 0.0))
        if int(match[1]) in iterations:
            continue  # another rank's line of the same iteration
        iterations.add(int(match[1]))
        reading.after, reading.planned = begin + at + 1, int(match[2])
        milliseconds = fields.get(_TIME, fields.get(_TIME_TODAY))
        gbs = fields.get("global_batch_size") if _TIME_TODAY not in fields else None
        all_tokens, tokens = fields.get("tokens_per_sec"), fields.get("tokens_per_sec_per_gpu")
        if all_tokens and tokens:
            # a guess: a further start's may round to another number
            reading.guesses.setdefault("devices", round(all_tokens / tokens))
        reading.steps.append(
            Step(
                iteration=int(match[1]),
                sec_per_it=milliseconds / 1000.0 if milliseconds else None,
                gbs=int(gbs) if gbs else None,
                loss=math.nan if _LOST.search(line) else fields.get("lm_loss"),
                tflops=fields.get("model_tflops_per_gpu"),
                tokens_per_s_per_device=tokens,
            )
        )
    _beside(words, reading.cells)
    if all(name in reading.cells for name in ("dp", "tp", "pp")):
        reading.guesses.pop("devices", None)  # the degrees give it exactly
    return reading


def _beside(words: set[str], cells: dict[str, Cell]) -> None:
    """State what words mean beside the cells: a schedule, weights without a master copy, how a sequence is shared.

    nanotron/nn/llama3_ring_attention.py gathers keys and values; nanotron/helpers.py holds weights in fp32 where their
    gradients are summed in it.
    """
    schedule = next((_ENGINES[word] for word in _ENGINES if word in words), None)
    if schedule and cells.get("pp") not in (None, 1):
        cells["schedule"] = schedule
    if _SUMS_NARROW in words and cells.get("precision") == "bf16":
        cells["precision"] = "bf16_pure"
    if cells.get("cp") not in (None, 1):
        cells["cp_kind"] = "all_gather"


def _settings(line: str, reading: LogReading) -> set[str]:
    """State what a line does of the training, and give its words."""
    for name, value in _SETTING.findall(line):
        reading.cells.setdefault(_COLUMNS[name], stated_cell(_COLUMNS[name], value))
    words = set(_WORD.findall(line))
    for word in sorted(words):
        named = {"optimizer": optimizer_cell(word)} if word.startswith("name=") else _WORDS.get(word, {})
        for column, cell in named.items():
            if cell is not None:
                reading.cells.setdefault(column, cell)
    if _START.search(line):
        for name, value in _STARTED.findall(line):
            reading.cells.setdefault(_STARTED_COLUMNS[name], int(value))
    if reserved := _RESERVED.search(line):
        reading.mem_gib_by_rank[0] = max(float(reserved[1]) / 2**10, reading.mem_gib_by_rank.get(0, 0.0))
    for trait, count in _EXPERTS.findall(line):
        if int(count) > 1:
            reading.mixture = mixture(trait, count)
        if int(count) > 1 and trait == "expert_parallel_size":
            # they multiply the world, and see the same samples (src/nanotron/parallel/context.py until March 2025)
            reading.refusal = f"{trait} is {count}: ranks of experts are beside replicas, which no row can say"
    return words


def _fields(text: str) -> dict[str, float]:
    fields = {}
    for part in text.split("|"):
        if pair := _FIELD.match(part):
            try:
                value = float(pair[2]) * _SCALE[pair[3]]
            except ValueError:
                continue
            if abs(value) < 1e30:
                fields[pair[1]] = value
    return fields
