"""Logs of OLMo-core: its configuration as Python prints it, and the metrics of its console logger."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from trimaran.nouns.columns import Cell
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
from trimaran.store.importers.text import clock_of, loss_of, number_of

# of so many steps, or of `???` where tokens or epochs say how far it goes (train/callbacks/console_logger.py)
_STEP = re.compile(r"\[step=([\d,]{1,12})/(?:([\d,]{1,12})|\?{3}),epoch=\d{1,6}")
_METRIC = re.compile(r"(?:^|\s)\s{1,12}(\w[\w/ ()-]{0,80})=([-+\d.,eE]{1,30}|nan|-?inf)\s*$")
_STAMP = re.compile(r"\b(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.(\d{3})\b")
_LOSS, _BATCHES, _TOKENS = "train/CE loss", "throughput/device/BPS", "throughput/device/TPS"
_TFLOPS = "throughput/device/TFLOPs_per_GPU"
# The second name is the older one (train/callbacks/gpu_memory_monitor.py).
_MEMORIES = ("gpu_memory/GPU active mem (GiB)", "system/GPU active mem (GiB)")

# The first of each counts: the model's configuration comes before those of others that name a size alike.
_SIZES = {
    "hidden": re.compile(r"\bd_model=(\d{1,9})\b"),
    "vocab": re.compile(r"TransformerConfig\([^()]{0,200}?\bvocab_size=(\d{1,9})\b"),
    "layers": re.compile(r"\bn_layers=(\d{1,9})\b"),
    "heads": re.compile(r"\bn_heads=(\d{1,9})\b"),
    "kv_heads": re.compile(r"\bn_kv_heads=(\d{1,9})\b"),
    "ffn_hidden": re.compile(r"FeedForwardConfig\(hidden_size=(\d{1,9})\b"),
    "seq_len": re.compile(r"\bsequence_length=(\d{1,9})\b"),
    "tp": re.compile(r"TensorParallelConfig\(\s*degree=(\d{1,9})\b"),
    "pp": re.compile(r"PipelineParallelConfig\([^()]{0,200}?\bdegree=(\d{1,9})\b"),
    "cp": re.compile(r"ContextParallelConfig\(\s*degree=(\d{1,9})\b"),
    "ep": re.compile(r"ExpertParallelConfig\(\s*degree=(\d{1,9})\b"),
    "nodes": re.compile(r"\bnum_nodes=(\d{1,9})\b"),
    "devices_per_node": re.compile(r"\bnum_gpus=(\d{1,9})\b"),
}
_TOKEN_COUNTS = {
    "mbs": re.compile(r"\brank_microbatch_size=(\d{1,12})\b"),
    "gbs": re.compile(r"\bglobal_batch_size=(\d{1,12})\b"),
}
_WORDS: tuple[tuple[re.Pattern[str], dict[str, Cell]], ...] = (
    (re.compile(r"DataParallelConfig\(name='(?:fsdp|hsdp)'"), {"dp_kind": "fully_sharded", "zero_stage": 3}),
    (re.compile(r"DataParallelConfig\(name='ddp'"), {"dp_kind": "all_reduce", "zero_stage": 0}),
    (re.compile(r"param_dtype='bfloat16'"), {"precision": "bf16"}),
    (re.compile(r"ActivationCheckpointingConfig\(mode='full'"), {"recompute": "full"}),
    (re.compile(r"ac_config=None"), {"recompute": "none"}),
    (re.compile(r"tp_config=None"), {"tp": 1}),
    (re.compile(r"\bTransformerTrainModuleConfig\("), {"pp": 1}),  # one of pipelines has a class of its own
)
# Groups of replicas that share out their weights, of which there is one on each node unless it is stated otherwise
# (distributed/parallel/data_parallel.py, get_replicate_and_shard_degree).
_HYBRID = re.compile(r"DataParallelConfig\(name='hsdp'[^()]{0,300}")
_GROUPS = re.compile(r"\b(num_replicas|shard_degree)=(\d{1,9})\b")
# How ranks that share a sequence meet all keys: by a field of its own, or since late 2025 by that of a nested style
# (train/train_module/transformer/config.py, nn/attention/ring.py). Llama 3's way gathers keys and values.
_CONTEXT = re.compile(r"ContextParallelConfig\(.{0,300}?(?:\bload_balancer='(\w{1,20})'|\buly=\w{1,40}\()", re.DOTALL)
_CONTEXT_KINDS = {"zig_zag": "ring", "llama3": "all_gather", "ulysses": "ulysses", None: "ulysses"}
# Schedules by PyTorch's names; those of several stages a rank have two unless splits are stated
# (distributed/parallel/pipeline_parallel.py; get_split_points of train/train_module/transformer/config.py).
_PIPELINE = re.compile(r"PipelineParallelConfig\([^()]{0,300}?\bschedule='(\w{1,40})'([^()]{0,2000})")
_SCHEDULES = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zbv"}
_SINGLE = ("1F1B", "GPipe")
_SPLITS = re.compile(r"\bsplit_points=\[([\d,\s]{1,1000})\]")
_ALL_OF_A_GROUP = re.compile(r"ExpertParallelConfig\(\s*degree=-1\b")
_OPTIMIZER = re.compile(r"\boptim=(\w{1,40})Config\(")
# The second is that of blocks since 2026 (nn/moe, RoutedExpertsConfig).
_EXPERTS = re.compile(r"\b(feed_forward_moe|routed_experts)=(?!None\b)(\w{1,40})")


def recognises(text: str) -> bool:
    """Whether the text holds steps of OLMo-core's console logger, or its configuration where none was reached."""
    return any("olmo_core." in line for line in text.split("\n")) and (
        _STEP.search(text) is not None or "TransformerConfig(" in text
    )


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The rows of one log, which may hold several trainings.

    The batches a second give a step's time, or the clock of the log's lines.
    """
    lines = text.split("\n")
    parts = parts_of(lines, lambda line: "TransformerConfig(" in line, _made)
    return drafts_of_trainings([_reading_of(part, begin) for begin, part in parts], lines, given)


def _made(line: str) -> bool:
    """Whether a line is of a step: its own, or of a metric, whose name says what it is of, as no setting's does."""
    if "=" not in line:
        return False
    metric = _METRIC.search(line) if "/" in line else None
    return ("[step=" in line and _STEP.search(line) is not None) or (metric is not None and "/" in metric[1])


def _reading_of(lines: Sequence[str], begin: int) -> LogReading:
    """What some lines of a log, from `begin` on, say of one training."""
    text = "\n".join(lines)
    reading = LogReading(cells=_settings(text), begin=begin, after=begin)
    if experts := _EXPERTS.search(text):
        reading.mixture = mixture(experts[1], experts[2])
    _pipeline(text, reading)
    gbs = reading.cells.get("gbs")
    clocked: list[tuple[int, float | None, dict[str, float]]] = []
    for at, line in enumerate(lines):
        if step := _STEP.search(line):
            clocked.append((int(step[1].replace(",", "")), clock_of(_STAMP.search(line)), {}))
            reading.after = begin + at + 1
            reading.planned = int(step[2].replace(",", "")) if step[2] else None
        elif clocked and (metric := _METRIC.search(line)):
            name = metric[1].strip()
            if (value := (loss_of if name == _LOSS else number_of)(metric[2])) is not None:
                clocked[-1][2][name] = value
            reading.after = begin + at + 1
    before: tuple[int, float] | None = None
    by_clock = False
    for number, clock, metrics in clocked:
        again = before is not None and number <= before[0]
        rate = metrics.get(_BATCHES)
        seconds = 1.0 / rate if rate else None
        if seconds is None and clock is not None and before is not None and number > before[0] and clock > before[1]:
            seconds = (clock - before[1]) / (number - before[0])
            by_clock = True
        if again:
            seconds = None  # it carries the start-up
            reading.notes.append(f"started again before iteration {number}")
        before = (number, clock) if clock is not None else before
        if memory := next((metrics[name] for name in _MEMORIES if name in metrics), 0.0):
            reading.mem_gib_by_rank[0] = max(memory, reading.mem_gib_by_rank.get(0, 0.0))
        batch = gbs if isinstance(gbs, int) else None
        reading.steps.append(
            Step(number, seconds, batch, metrics.get(_LOSS), metrics.get(_TFLOPS), metrics.get(_TOKENS))
        )
    # the rate is that of the step by itself, however seldom one is logged (train/callbacks/speed_monitor.py)
    reading.sampled = any(_BATCHES in metrics for _, _, metrics in clocked)
    if by_clock:
        reading.notes.append("sec_per_it from the clock of the log's lines, evaluations and checkpoints included")
    return reading


def _pipeline(text: str, reading: LogReading) -> None:
    """State schedule and chunks of a pipeline; one that no word says refuses the row."""
    stages, pipeline = _degree(reading.cells, "pp"), _PIPELINE.search(text)
    if stages == 1 or pipeline is None:
        return
    name = pipeline[1]
    if name not in _SCHEDULES:
        reading.refusal = f"the pipeline schedule is {name}: only {', '.join(_SCHEDULES)} can be said in a row"
        return
    splits = _SPLITS.search(pipeline[2])
    chunks = len(re.findall(r"\d+", splits[1])) + 1 if splits else stages * (1 if name in _SINGLE else 2)
    reading.cells |= {"schedule": _SCHEDULES[name], "vpp": chunks // stages}


def _settings(text: str) -> dict[str, Cell]:
    """The cells that the configuration states; its batches are in tokens."""
    cells: dict[str, Cell] = {}
    for column, pattern in _SIZES.items():
        if size := pattern.search(text):
            cells[column] = stated_cell(column, size[1])
    for pattern, stated in _WORDS:
        if pattern.search(text):
            cells |= {name: value for name, value in stated.items() if name not in cells}
    seq_len = cells.get("seq_len")
    for column, pattern in _TOKEN_COUNTS.items():
        tokens = pattern.search(text)
        if tokens and isinstance(seq_len, int) and int(tokens[1]) % seq_len == 0:
            cells[column] = int(tokens[1]) // seq_len
    if cells.get("cp") not in (None, 1) and (context := _CONTEXT.search(text)):
        cells["cp_kind"] = _CONTEXT_KINDS.get(context[1])
    if optimizer := _OPTIMIZER.search(text):
        cells["optimizer"] = optimizer_cell(optimizer[1])
    nodes, per_node = cells.get("nodes"), cells.get("devices_per_node")
    if isinstance(nodes, int) and isinstance(per_node, int):
        cells["devices"] = nodes * per_node
        if hybrid := _HYBRID.search(text):
            replicas = nodes * per_node // math.prod(_degree(cells, name) for name in ("tp", "pp", "cp"))
            groups = {name: int(size) for name, size in _GROUPS.findall(hybrid[0])}
            cells["shard"] = groups.get("shard_degree") or replicas // max(1, groups.get("num_replicas", nodes))
            if _ALL_OF_A_GROUP.search(text):
                cells["ep"] = cells["shard"]
    return {name: value for name, value in cells.items() if value is not None}


def _degree(cells: Mapping[str, Cell], name: str) -> int:
    size = cells.get(name)
    return size if isinstance(size, int) and size > 0 else 1
