"""Logs of NeMo: the bar of its Megatron trainer, the step lines of NeMo 2, and those of its Automodel."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trimaran.nouns.columns import Cell
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.logs.megatron_settings import recompute_of
from trimaran.store.importers.logs.progress_bar import BAR_NOTE, ELAPSED, seconds_of, steps_of
from trimaran.store.importers.logs.steps import (
    LogReading,
    Step,
    drafts_of_trainings,
    mixture,
    optimizer_cell,
    parts_of,
    stated_cell,
    trained_in_part,
)
from trimaran.store.importers.text import clock_of, loss_of, number_of

# `50/50 [23:22<0:00, reduced_train_loss=0.1, global_step=49.00, consumed_samples=51200.0, train_step_timing in s=24.0]`
_BAR = re.compile(
    r"\b(\d{1,9})/\d{1,9} \[[^\]]{0,60}(?:, [^\]]{0,200})?\breduced_train_loss=([^,\]]{1,20})([^\]]{0,400})\]?"
)
_FIELD = re.compile(
    r"\b(global_step|consumed_samples|train_step_timing in s|TFLOPS_per_GPU|tflops_per_sec_per_gpu)="
    r"(\d{1,12}(?:\.\d{1,6})?)(?=[,\]]|$)"
)
# `| 795/77225 [9:07:58<878:01:48, 41.36s/it, `: how far the bar is, when, and its mean since it began
_CLOCK = re.compile(rf"\b(\d{{1,9}})/\d{{1,9}} \[{ELAPSED}[^,\]]{{1,20}}, {{1,4}}(\d{{1,6}}\.\d\d)(s/it|it/s)")
# today's name of the figure, and that of 2024 (nemo/lightning/pytorch/callbacks/flops_callback.py)
_TFLOPS = ("TFLOPS_per_GPU", "tflops_per_sec_per_gpu")
# `Training epoch 0, iteration 1/9 | global_batch_size: 8 | global_step: 1 | reduced_train_loss: 0.66 | ...`
_ITERATION = re.compile(r"\bTraining epoch (\d{1,6}), iteration (\d{1,9})/(\d{1,9}) \|(.{0,1000})")
_NAMED = re.compile(
    r"\b(global_step|global_batch_size|max_memory_reserved|peak_memory_usage|reduced_train_loss|"
    r"train_step_timing in s|TFLOPS_per_GPU|tflops_per_sec_per_gpu): ([-+.\deE]{1,20}|nan|-?inf)(?= \||\s*$)"
)
# `step 1 | epoch 0 | loss 10.9521 | ... | mem 38.39 GiB | tps 132005.57(66002.79/gpu) | num_label_tokens 524288`
_STEP = re.compile(
    r"\bstep (\d{1,9}) \| epoch \d{1,6} \| loss (\S{1,20}) \|.{0,120}?\| mem (\d{1,6}\.\d{1,4}) GiB \| "
    r"tps (\d{1,12}(?:\.\d{1,4})?)\(\d{1,12}(?:\.\d{1,4})?/gpu\) \| num_label_tokens (\d{1,12})"
)
_STAMP = re.compile(r"\b(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,](\d{3}))? \|")
# So far off by the clock, which has whole seconds, a time may be.
_FURTHEST, _TICK_S = 1.1, 1.0
# `micro_batch_size: 4` in a configuration as it is printed, behind a logger's prefix or without
_SETTING = re.compile(r"(?:^|[|\s])([a-z]\w{1,50}): (\S{1,80})\s*$")
_COLUMNS = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn_hidden",
    "num_attention_heads": "heads",
    "num_query_groups": "kv_heads",
    "encoder_seq_length": "seq_len",
    "seq_length": "seq_len",
    "micro_batch_size": "mbs",
    "local_batch_size": "mbs",
    "global_batch_size": "gbs",
    "tensor_model_parallel_size": "tp",
    "tp_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "pp_size": "pp",
    "context_parallel_size": "cp",
    "cp_size": "cp",
    "expert_model_parallel_size": "ep",
    "ep_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "num_nodes": "nodes",
    "devices": "devices_per_node",
}
# of Automodel and, in Lightning's words, of NeMo
_WORLD = re.compile(r"\bWorld size: (\d{1,8})\s*$|\bprocesses registered\. Starting with (\d{1,8}) processes")
_VOCAB = re.compile(r"\bPadded vocab_size: (\d{1,9}),")
_OPTIMIZER = re.compile(r"<class 'torch\.optim\.(?!lr_scheduler)\w{1,40}\.(\w{1,40})'>")
_EXPERTS = ("num_moe_experts", "num_experts")
# nemo/collections/nlp/parts/nlp_overrides.py and megatron_trainer_builder.py: what `model.optim.name` shares out
_STAGES = {"distributed_fused_adam": 1, "mcore_distributed_optim": 1, "fused_adam": 0, "megatron_fused_adam": 0}
_FSDP_STAGES = {"full": 3, "grad": 2}
_MLPS = {"swiglu": "swiglu", "fast-swiglu": "swiglu", "squared-relu": "relu2"}
_PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16", "32": "fp32"}


def recognises(text: str) -> bool:
    """Whether the text holds steps of one of NeMo's trainers."""
    return any(_is_step(line) for line in text.split("\n"))


def _is_step(line: str) -> bool:
    return bool(
        ("reduced_train_loss=" in line and _BAR.search(line))
        or ("reduced_train_loss: " in line and _ITERATION.search(line))
        or ("num_label_tokens" in line and _STEP.search(line))
    )


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The rows of one log, which may hold several trainings."""
    lines = text.split("\n")
    parts = parts_of(lines, _begins, _is_step)
    return drafts_of_trainings([_reading_of(part, begin) for begin, part in parts], lines, given)


def _begins(line: str) -> bool:
    """Whether a line is of a configuration, which is printed before the first step."""
    setting = _SETTING.search(line)
    return setting is not None and setting[1] in _COLUMNS and setting[2].isdecimal() and not _is_step(line)


def _reading_of(lines: Sequence[str], begin: int) -> LogReading:
    """What some lines of a log, from `begin` on, say of one training.

    Automodel's tokens a second and those of its batch give a step's time.
    """
    reading = LogReading(begin=begin, after=begin)
    steps: dict[int, Step] = {}
    settings: dict[str, str] = {}
    for at, line in enumerate(lines):
        step = _automodel_step(line, reading) or _iteration_step(line, reading) or _bar_step(line)
        if step is not None:
            steps.setdefault(step.iteration, step)
            reading.after = begin + at + 1
        elif world := _WORLD.search(line):
            reading.cells["devices"] = int(world[1] or world[2])
        elif vocab := _VOCAB.search(line):
            reading.cells["vocab"] = int(vocab[1])
        elif "FSDP2Manager" in line:
            reading.cells |= {"dp_kind": "fully_sharded", "zero_stage": 3}
        elif optimizer := _OPTIMIZER.search(line):
            reading.cells["optimizer"] = optimizer_cell(optimizer[1])
        elif setting := _SETTING.search(line):
            settings.setdefault(_optimizer_name(setting[1], setting[2]), setting[2])
            _setting(setting[1], setting[2], reading)
    _set_up(settings, reading)
    reading.refusal = trained_in_part(lines[: reading.after - begin])
    reading.steps = [steps[number] for number in sorted(steps)]
    # NeMo times each step by itself (`TimingCallback`), however seldom one is logged
    reading.sampled = any(step.sec_per_it for step in reading.steps)
    if not reading.sampled:
        _time_by_bar(lines, reading)
    _held_against_the_clock(lines, reading)
    return reading


def _automodel_step(line: str, reading: LogReading) -> Step | None:
    match = _STEP.search(line)
    if match is None:
        return None
    reading.mem_gib_by_rank[0] = max(float(match[3]), reading.mem_gib_by_rank.get(0, 0.0))
    all_tokens, ranks = float(match[4]), reading.cells.get("devices")
    seconds = int(match[5]) / all_tokens if all_tokens else None
    # its own figure of a GPU is that of a replica, which TP and PP spread over several
    tokens = all_tokens / ranks if isinstance(ranks, int) and ranks else None
    return Step(int(match[1]), seconds, loss=loss_of(match[2]), tokens_per_s_per_device=tokens)


def _held_against_the_clock(lines: Sequence[str], reading: LogReading) -> None:
    """Doubt Automodel's times where its steps take longer by the clock of their lines.

    A time is of the tokens with a label, and the tokens a second count those without one too, as of prompts
    (nemo_automodel/recipes/llm/train_ft.py, _run_train_optim_step).
    """
    found = ((_STEP.search(line), _STAMP.search(line)) for line in lines if "num_label_tokens" in line)
    clocked = {int(step[1]): (clock, step) for step, stamp in found if step and (clock := clock_of(stamp)) is not None}
    pairs = sorted(
        (clock - clocked[number - 1][0], int(step[5]) / float(step[4]))
        for number, (clock, step) in clocked.items()
        if number - 1 in clocked and float(step[4])
    )
    kept = pairs[:-1] or pairs  # the longest may have another start in it
    passed, took = (math.fsum(each) for each in zip(*kept, strict=True)) if kept else (0.0, 0.0)
    if passed > _FURTHEST * took + _TICK_S:
        reading.suspect = (
            f"by the log's clock {len(kept)} steps took {passed:.4g} s and by num_label_tokens {took:.4g} s: tokens a "
            f"second count those without a label too"
        )


def _bar_step(line: str) -> Step | None:
    """A step by the bar: the samples consumed give the global batch where both counts are printed whole."""
    found = None
    for match in _BAR.finditer(line):
        found = match
    if found is None:
        return None
    fields = {name: float(value) for name, value in _FIELD.findall(found[3])}
    step, samples = fields.get("global_step"), fields.get("consumed_samples")
    gbs = None
    if step is not None and samples and samples % (step + 1) == 0:
        gbs = int(samples / (step + 1))
    seconds = fields.get("train_step_timing in s") or None
    return Step(int(found[1]), seconds, gbs, loss_of(found[2]), _tflops(fields))


def _iteration_step(line: str, reading: LogReading) -> Step | None:
    match = _ITERATION.search(line)
    if match is None:
        return None
    named = dict(_NAMED.findall(match[4]))
    fields = {name: value for name, text in named.items() if (value := number_of(text)) is not None}
    number, gbs = fields.get("global_step", float(match[2])), fields.get("global_batch_size")
    seconds, loss = fields.get("train_step_timing in s"), loss_of(named.get("reduced_train_loss", ""))
    # in bytes, of the rank that logs; NeMo 2.0 had the second name for it (megatron_strategy.py, training_step)
    if (reserved := fields.get("max_memory_reserved", fields.get("peak_memory_usage", 0.0))) > 0:
        reading.mem_gib_by_rank[0] = max(reserved / 2**30, reading.mem_gib_by_rank.get(0, 0.0))
    # iterations are of an epoch, whose last is the training's where it has no other
    reading.planned = int(match[3]) if int(match[1]) == 0 else None
    return Step(int(number), seconds or None, int(gbs) if gbs else None, loss, _tflops(fields))


def _tflops(fields: Mapping[str, float]) -> float | None:
    return next((fields[name] for name in _TFLOPS if name in fields), None)


def _time_by_bar(lines: Sequence[str], reading: LogReading) -> None:
    """Times of a bar without any of its own: of what elapsed between its steps, and its mean up to the first."""
    clock: dict[int, int] = {}
    begun = None
    for done, elapsed, rate, unit in (found for line in lines for found in _CLOCK.findall(line)):
        clock.setdefault(int(done), seconds_of(elapsed))
        if begun is None and float(rate):
            passed = clock[int(done)] / float(rate) if unit == "s/it" else clock[int(done)] * float(rate)
            # a bar that goes on from a checkpoint has made fewer steps than it counts
            begun = max(0, round(int(done) - passed))
    times = {step.iteration: step.sec_per_it for step in steps_of(clock, begun or 0)}
    if any(times.values()):
        reading.steps = [replace(step, sec_per_it=times.get(step.iteration)) for step in reading.steps]
        reading.notes.append(BAR_NOTE)


def _optimizer_name(name: str, value: str) -> str:
    """The name of a setting; that of an optimizer is `name` alone, as those of other sections are."""
    return "optim" if name == "name" and value in _STAGES else name


def _set_up(settings: Mapping[str, str], reading: LogReading) -> None:
    """State what settings say beside each other: arithmetic, shards, MLP, and what is computed again."""
    cells = reading.cells
    if settings.get("fp8") == "true":
        cells["precision"] = "mxfp8" if settings.get("fp8_recipe") == "mxfp8" else "fp8"
    if (optimizer := settings.get("optim")) is not None:
        cells["optimizer"] = "adam"
        sharded = settings.get("fsdp") == "true"
        stage = _FSDP_STAGES.get(settings.get("fsdp_sharding_strategy", "")) if sharded else _STAGES[optimizer]
        cells |= {} if stage is None else {"zero_stage": stage}
    if (mlp := _MLPS.get(settings.get("activation", ""))) is not None:
        cells["mlp"] = mlp
    named = {name: "None" if value == "null" else value for name, value in settings.items()}
    if (granularity := named.get("activations_checkpoint_granularity")) is not None:
        recompute, unsaid = recompute_of({**named, "recompute_granularity": granularity}, cells)
        cells |= {} if recompute is None else {"recompute": recompute}
        reading.notes += [unsaid] if unsaid else []


def _setting(name: str, value: str, reading: LogReading) -> None:
    if name in _COLUMNS and value.isdecimal():
        reading.cells.setdefault(_COLUMNS[name], stated_cell(_COLUMNS[name], value))
    elif name == "precision" and value in _PRECISIONS:
        reading.cells["precision"] = _PRECISIONS[value]
    elif name in _EXPERTS and value.isdecimal() and int(value) > 1:
        reading.mixture = mixture(name, value)
