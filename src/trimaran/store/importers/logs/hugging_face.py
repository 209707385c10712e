"""What Hugging Face's Trainer leaves: its log, with a progress bar for the times, and `trainer_state.json`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from trimaran.nouns.columns import Cell
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.json_text import json_object, number_in
from trimaran.store.importers.logs.deepspeed import settings
from trimaran.store.importers.logs.progress_bar import (
    BAR_NOTE,
    ELAPSED,
    seconds_in_words,
    seconds_of,
    steps_of,
)
from trimaran.store.importers.logs.steps import (
    LogReading,
    Step,
    drafts_of,
    drafts_of_trainings,
    mixture,
    optimizer_cell,
    parts_of,
    trained_in_part,
)
from trimaran.store.importers.text import loss_of, number_of

_START = "***** Running training *****"
_COUNTS = {
    "mbs": re.compile(r"Instantaneous batch size per device = ([\d,]{1,12})"),
    "gbs": re.compile(r"Total train batch size \(.{1,60}\) = ([\d,]{1,12})"),
    "accumulation": re.compile(r"Gradient Accumulation steps = ([\d,]{1,12})"),
    "steps": re.compile(r"Total optimization steps = ([\d,]{1,12})"),
    # the second since Transformers 5
    "begun": re.compile(
        r"(?:Continuing training from|Resuming training from checkpoint with epoch \d{1,6} and) "
        r"global step ([\d,]{1,12})"
    ),
}
# `"n_embd": 768,` in the configuration as it is printed, and `Overriding config: n_embd=7168,n_head=32`
_SIZES = {
    "layers": ("n_layer", "num_hidden_layers"),
    "hidden": ("n_embd", "hidden_size"),
    "heads": ("n_head", "num_attention_heads"),
    "kv_heads": ("num_key_value_heads",),
    "ffn_hidden": ("n_inner", "intermediate_size"),
    "vocab": ("vocab_size",),
}
_PRINTED = re.compile(r"(?:^|\s)\"(\w{1,40})\": (\d{1,9}),?\s*$")
_OVERRIDES = re.compile(r"Overriding config: (\S{1,2000})")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
# Arguments of the training, as `TrainingArguments(` lists them and as a configuration is overridden.
_SWITCH = re.compile(r"\b(bf16|fp16|gradient_checkpointing)=(true|false)\b", re.IGNORECASE)
_OPTIMIZER = re.compile(r"\boptim=([\w.]{1,60})")
# what PyTorch's FSDP shares out; of hybrid sharding the arguments do not say among how many
_FSDP = re.compile(r"\bfsdp=\[[^\]]{0,200}\bFSDPOption\.(FULL_SHARD|SHARD_GRAD_OP)\b")
_FSDP_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}
_BAR = re.compile(rf"\b(\d{{1,9}})/(\d{{1,9}}) \[{ELAPSED}")
# what ms-swift adds: `'global_step/max_steps': '40/94', 'percentage': '42.55%', 'elapsed_time': '1m 18s'`, `iteration`
# in place of the steps under Megatron, and what PyTorch had reserved (swift/trainers/patcher.py, add_train_message)
_SWIFT = re.compile(
    r"'(?:global_step/max_steps|iteration)': '(\d{1,9})/(\d{1,9})', .{0,80}?"
    r"'elapsed_time': '((?:\d{1,5}[dhms] ?){1,4})'"
)
# a line of `trainer_log.jsonl`, which LLaMA-Factory keeps of it (src/llamafactory/train/callbacks.py, LogCallback)
_FACTORY = re.compile(
    r'\{"current_steps": (\d{1,9}), "total_steps": (\d{1,9}),(?: "loss": ([-+.\deE]{1,24}),)?[^\n}]{0,400}?'
    r'"elapsed_time": "([\d:]{4,12})"[^\n}]{0,200}\}'
)
_RESERVED = re.compile(r"'memory\(GiB\)': (\d{1,6}(?:\.\d{1,6})?)")
# what axolotl adds, of rank 0: `'memory/max_active (GiB)': '25.45'`, and `'memory/max_mem_active(gib)': 25.45` before
_MEMORY = re.compile(r"'memory/max_(?:mem_)?active ?\(gib\)': '?(\d{1,6}(?:\.\d{1,6})?)", re.IGNORECASE)
_BAR_ENDS = ("it/s]", "s/it]")
_ENTRY = re.compile(r"\{'(?:loss|train_runtime)'.{1,600}?\}")
# `'loss': 0.5768`, and `'loss': '0.5768'` since Transformers 5
_FIGURE = re.compile(r"'(\w{1,60})': '?([-+.\w]{1,40})")
# A rate is printed to a thousandth: below this it is told to no per cent.
_LEAST_RATE = 0.05
# So far apart two sums of the same losses may be, of which one has them rounded.
_SAME_SUM = 0.01


def recognises(text: str) -> bool:
    """Whether the text is a Trainer's log or its state."""
    if '"current_steps"' in text and _FACTORY.search(text):
        return True
    return _START in text or ('"log_history"' in text and "log_history" in json_object(text))


def recognises_bare(text: str) -> bool:
    """Whether the text holds what a Trainer prints of its steps, which documents quote too.

    The header is logged at a level that is not shown by default.
    """
    return any(_ENTRY.search(line) for line in text.split("\n"))


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The rows of one log, or of one `trainer_state.json`."""
    state = json_object(text)
    return _of_state(state, given) if "log_history" in state else _of_log(_as_printed(text), given)


def _as_printed(text: str) -> str:
    """LLaMA-Factory's lines as the Trainer prints the same: its bar, a loss, its header where the clock restarts."""
    clock = 0

    def printed(line: re.Match[str]) -> str:
        nonlocal clock
        made, of, loss, elapsed = line.groups()
        header = f"{_START}\n" if seconds_of(elapsed) < clock else ""
        clock = seconds_of(elapsed)
        return f"{header}{made}/{of} [{elapsed}<" + (f" {{'loss': {loss}}}" if loss else "")

    return _FACTORY.sub(printed, text)


def _of_state(state: Mapping[str, object], given: Mapping[str, Cell]) -> list[Draft]:
    reading = LogReading()
    history = state["log_history"]
    entries = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    mbs = number_in(state, "train_batch_size")
    reading.cells |= {"mbs": int(mbs)} if mbs else {}
    for entry in entries:
        step, loss = number_in(entry, "step"), number_in(entry, "loss")
        if step is not None and loss is not None:
            reading.steps.append(Step(int(step), loss=loss))
    # a training that went on behind its end has one of each of its jobs
    ended = next((entry for entry in reversed(entries) if number_in(entry, "train_runtime")), {})
    total = number_in(state, "global_step")
    begun = _begun(reading.steps, number_in(ended, "train_loss"), total) if total else 0
    _mean_time(reading, number_in(ended, "train_runtime"), total, begun)
    return drafts_of(reading, (), given)


def _begun(steps: Sequence[Step], train_loss: float | None, total: float) -> int:
    """The step from which the last job of a training went on, by its mean loss; 0 where nothing tells one.

    The Trainer sums the losses of this job, and divides by all steps that the training made (transformers 5.18,
    trainer.py, _finalize_training). A loss is the mean since the one before it.
    """
    if not train_loss or not steps:
        return 0
    logged = [*((step.iteration, step.loss or 0.0) for step in steps), (round(total), steps[-1].loss or 0.0)]
    spans = [(before, after, loss) for (before, _), (after, loss) in pairwise([(0, 0.0), *logged]) if after > before]
    left = train_loss * total
    if left > (1 - _SAME_SUM) * sum((after - before) * loss for before, after, loss in spans):
        return 0
    for before, after, loss in reversed(spans):
        if left <= (after - before) * loss:
            return round(after - left / loss)
        left -= (after - before) * loss
    return 0


def _of_log(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    lines = text.split("\n")
    parts = parts_of(lines, lambda line: _START in line, _made)
    return drafts_of_trainings([_reading_of(part, begin) for begin, part in parts], lines, given)


def _made(line: str) -> bool:
    """Whether a line shows what a training made."""
    return bool(_ENTRY.search(line)) or any(done > 0 for done, _, _ in _progress(line))


def _reading_of(lines: Sequence[str], begin: int) -> LogReading:
    """What some lines of a log, from `begin` on, say of one training."""
    reading = LogReading(begin=begin, after=begin)
    said = [line for line in lines if not (line.endswith(_BAR_ENDS) and "%|" in line[:8])]  # a bar may fill the log
    counts = {name: found for name, pattern in _COUNTS.items() if (found := _last_count(pattern, said)) is not None}
    _model(said, reading)
    reading.cells |= {name: counts[name] for name in ("mbs", "gbs") if name in counts}
    ranks = counts.get("mbs", 0) * counts.get("accumulation", 1)
    if ranks and "gbs" in counts and counts["gbs"] % ranks == 0:
        reading.cells["dp"] = counts["gbs"] // ranks
    engine = settings(lines)
    if engine and engine.get("dp") == reading.cells.get("dp"):
        # the batch is spread over all ranks of the engine's world, so that no rank shares a replica with another
        reading.cells |= {"tp": 1, "pp": 1}
    for name, value in engine.items():
        reading.cells.setdefault(name, value)
    for at, line in enumerate(lines):
        if _START in line or _ENTRY.search(line) or _BAR.search(line):
            reading.after = begin + at + 1
    reading.refusal = trained_in_part(lines[: reading.after - begin])
    if memory := [float(gib) for line in lines if "'memory/" in line for gib in _MEMORY.findall(line)]:
        reading.mem_gib_by_rank[0] = max(memory)
        reading.notes.append("memory is the most that PyTorch had in use")
    elif reserved := [float(gib) for line in lines if "'memory(" in line for gib in _RESERVED.findall(line)]:
        reading.mem_gib_by_rank[0] = max(reserved)
        reading.notes.append("memory is the most that PyTorch had reserved")
    entries = _entries(lines)
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    last = next((entry for entry in entries if entry.get("train_runtime")), {})
    total, begun = counts.get("steps") or _bar_total(lines), counts.get("begun", 0)
    reading.planned = total
    bar = _bar_steps(lines, total, begun)
    reading.steps += bar or [Step(number, loss=loss) for number, loss in enumerate(losses, start=1)]
    if bar:
        reading.notes.append(BAR_NOTE)
    elif total is None and last.get("train_steps_per_second", 0.0) >= _LEAST_RATE:
        _mean_time(reading, last["train_runtime"], last["train_runtime"] * last["train_steps_per_second"])
    else:
        _mean_time(reading, last.get("train_runtime"), total, begun)
    return reading


def _model(lines: Sequence[str], reading: LogReading) -> None:
    """Shape and switches: of a configuration that is printed, and of what overrides it, which wins."""
    printed: dict[str, str] = {}
    overrides: dict[str, str] = {}
    for line in lines:
        if size := _PRINTED.search(line):
            printed[size[1]] = size[2]
        elif override := _OVERRIDES.search(line):
            overrides |= dict(pair.partition("=")[::2] for pair in override[1].split(","))
        for name, value in _SWITCH.findall(line):
            _switch(name, value.lower() == "true", reading.cells)
        if (optimizer := _OPTIMIZER.search(line)) and (cell := optimizer_cell(optimizer[1])):
            reading.cells["optimizer"] = cell
        if sharded := _FSDP.search(line):
            reading.cells |= {"dp_kind": "fully_sharded", "zero_stage": _FSDP_STAGES[sharded[1]]}
    stated = printed | overrides
    for column, names in _SIZES.items():
        if size_text := next((stated[name] for name in names if stated.get(name, "").isdecimal()), None):
            reading.cells[column] = int(size_text[:10])
    for trait in _EXPERTS:
        if stated.get(trait, "").isdecimal() and int(stated[trait]) > 1:
            reading.mixture = mixture(trait, stated[trait])


def _switch(name: str, on: bool, cells: dict[str, Cell]) -> None:
    if name == "gradient_checkpointing":
        cells["recompute"] = "full" if on else cells.get("recompute", "none")
    elif on:
        cells["precision"] = name


def _progress(line: str) -> list[tuple[int, int, int]]:
    """How many steps are made by each bar of a line, of how many, and after how many seconds."""
    bars = [(int(done), int(of), seconds_of(elapsed)) for done, of, elapsed in _BAR.findall(line)]
    said = _SWIFT.findall(line) if "'elapsed_time'" in line else ()
    return bars + [(int(done), int(of), seconds_in_words(elapsed)) for done, of, elapsed in said]


def _bar_total(lines: Sequence[str]) -> int | None:
    """How far the training's own bar counts, where no header says so: the bar that moved last before most losses."""
    totals: Counter[int] = Counter()
    of = None
    for line in lines:
        if bars := _progress(line):
            of = bars[-1][1]
        if of is not None and _ENTRY.search(line):
            totals[of] += 1
    return totals.most_common(1)[0][0] if totals else None


def _bar_steps(lines: Sequence[str], total: int | None, begun: int) -> list[Step]:
    """Steps by the training's own progress bar, which counts to the optimization steps; every rank prints one.

    A loss is of the step that the bar showed before it or, as not every step is drawn, of the next without one.
    """
    clock: dict[int, int] = {}
    losses: list[tuple[int, float]] = []
    at = begun
    for line in lines:
        for done, of, elapsed in _progress(line):
            if of == total:
                at = max(at, done)
                clock.setdefault(done, elapsed)
        losses += [(at, entry["loss"]) for entry in _entries([line]) if "loss" in entry]
    steps = []
    for step in steps_of(clock, begun):
        due = bool(losses) and losses[0][0] <= step.iteration
        steps.append(replace(step, loss=losses.pop(0)[1]) if due else step)
    return [*steps, *(Step(steps[-1].iteration, loss=loss) for _, loss in losses if steps)]


def _mean_time(reading: LogReading, runtime: float | None, total: float | None, begun: int = 0) -> None:
    """The mean over the whole training, where nothing else tells a step's time; a resumed one began at a later step."""
    if not runtime or not total or total <= begun:
        return
    made = total - begun
    reading.steps.append(Step(round(total), runtime / made))
    reading.sampled = True
    reading.notes.append(f"the mean over {made:.0f} steps, start-up and evaluations included")


def _entries(lines: Sequence[str]) -> list[dict[str, float]]:
    """Figures that the Trainer prints of itself, as `{'loss': 2.1, 'learning_rate': 5e-05, 'epoch': 0.1}`."""
    return [
        {
            name: value
            for name, text in _FIGURE.findall(entry)
            if (value := (loss_of if name == "loss" else number_of)(text)) is not None
        }
        for line in lines
        for entry in _ENTRY.findall(line)
    ]


def _last_count(pattern: re.Pattern[str], lines: Sequence[str]) -> int | None:
    found = None
    for line in lines:
        if match := pattern.search(line):
            digits = match[1].replace(",", "")
            found = int(digits) if digits else found
    return found
