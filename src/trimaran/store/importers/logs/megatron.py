"""Logs of Megatron-LM and Megatron-DeepSpeed: `iteration 2/ 95 | ... | elapsed time per iteration (s): 769.99 |`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trimaran.nouns.columns import Cell
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.logs.deepspeed import is_engine_setting
from trimaran.store.importers.logs.megatron_bridge import arguments_at, is_configuration
from trimaran.store.importers.logs.megatron_settings import NAMES, set_up, stack_of
from trimaran.store.importers.logs.steps import LogReading, Step, drafts_of_trainings, mixture
from trimaran.store.importers.text import clock_of, number_of

_ITERATION = re.compile(r"\biteration(?:\s|=\s?)\s{0,9}(\d{1,9})\s?/\s{0,9}(\d{1,9}|infinity)\s*\|")
# A field's first number: Primus prints the mean so far behind the current one, 13100.0/13240.9 or 560.1 (avg 559.8).
_FIELD = re.compile(r"\s*([A-Za-z][^|:=]{1,60}?)\s*[:=]\s*([-+.\w]{1,40})(?:/[\d.]{1,20}| \(avg [\d.]{1,20}\))?\s*$")
# `  hidden_size ..................................... 14336`, perhaps behind a rank's prefix; names of 30 letters and
# more leave no room for dots in older versions (Megatron-LM v2.6, megatron/arguments.py, _print_args)
_ARGUMENT = re.compile(r"\b([a-z][a-z0-9_]{1,60}) (\.{0,60}) (\[[^\]]{0,1000}\]|\S{1,60})\s*$")
# what GPT-NeoX prints behind a value
_CHANGED = re.compile(r"\.{3,60}(?:updated|default)$")
_VOCAB = re.compile(r"padded vocab \(size: (\d{1,9})\)")
_WORLD = re.compile(r"using world size: \d{1,8}, data-parallel[- ]size: \d{1,8}, .{0,200}")
# Those of an encoder, which some releases print beside them, are others; the same left out a comma, so that a name may
# stand behind a word: `context-parallel sizes: Nonetensor-model-parallel size: 4` (megatron/training/arguments.py).
_WORLD_SIZES = re.compile(
    r"(?<!encoder-)(world|data-parallel|context-parallel|sequence-parallel|tensor-model-parallel|pipeline-model-parallel)"
    r"[- ]size: (\d{1,8})"
)
_WORLD_COLUMNS = {
    "world": "devices", "data-parallel": "dp", "context-parallel": "cp", "tensor-model-parallel": "tp",
    "pipeline-model-parallel": "pp",
}  # fmt: skip
# Ranks write at once, so that several may stand in a line; Megatron-Bridge names its figures, in GB of 10^9 bytes
# (src/megatron/bridge/training/utils/train_utils.py, report_memory).
_MEMORY = re.compile(
    r"\[Rank (\d{1,7})\][^|\[]{0,80}memory \((MB|GB)\) \|[^\[]{0,400}?\b(?:mem-)?max[ -]reserved(?:-gigabytes)?: "
    r"(\d{1,9}(?:\.\d{1,9})?)"
)
_GIB = {"MB": 2**20 / 2**30, "GB": 1e9 / 2**30}
# What each of the trainers that print such lines says beside them.
_DEEPSPEED = re.compile(
    r"elapsed time per iteration \(s\)|\bactual.seqlen\s?[:=]|tokens per gpu per second \(tgs\)|approx flops per GPU:"
    r"|\[logging\.py:\d{1,5}:log_dist\]"
)
_SEQUENCE = re.compile(r"\bactual.seqlen\s?[:=]\s{0,9}(\d{1,9})")
# ` [2026-05-11 02:18:01.805039] iteration ...`, whose fraction came later: so far off its time may be, and such a share
# of the time between two lines may pass beside their iterations.
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{3})\d{3})?\] iteration")
# What lines of Megatron-Core have had since early 2024, and none of before (NVIDIA/Megatron-LM, issues 541 and 756).
_NEWER = re.compile(r"\[\d{4}-\d\d-\d\d [\d:.]{8,15}\] iteration|\b(?:throughput|compute|energy) per GPU \(")
_TICK_S, _SHORT_TICK_S, _BESIDE = 1.0, 0.01, 0.05
# Of Megatron-DeepSpeed, Megatron-LM, GPT-NeoX and Primus; of Primus and Megatron-DeepSpeed.
_TFLOPS = (
    "TFLOPs", "throughput per GPU (TFLOP/s/GPU)", "approx flops per GPU", "compute per GPU (TFLOP/s/GPU)"
)  # fmt: skip
_TOKENS = ("tokens per GPU (tokens/s/GPU)", "tokens/s/GPU inst/harmonic mean", "tokens per gpu per second (tgs)")
_EXPERTS_LOSS = re.compile(r"\| (?:\w{0,20}load_balancing|z)_loss:")


def recognises(text: str) -> bool:
    """Whether the text holds lines of Megatron's training log, or its arguments where no step was reached."""
    return any(
        ("elapsed" in line and (step := _step(line)) is not None and step.sec_per_it is not None)
        or ("tensor_model_parallel_size ..." in line and _ARGUMENT.search(line))
        or is_configuration(line)
        for line in text.split("\n")
    )


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The rows of one log, which may hold several trainings. DeepSpeed's prints seconds, or fields of its own."""
    lines = text.split("\n")
    deepspeed = _DEEPSPEED.search(text) is not None
    trainings = [_Training(LogReading())]
    configured = arguments_at(lines)
    for at, line in enumerate(lines):
        reading, arguments = trainings[-1].reading, trainings[-1].arguments
        if (step := _step(line)) is not None:
            if reading.steps and step.iteration == reading.steps[-1].iteration:
                continue  # printed twice, by another rank, or made again by a further start, whose first it is
            if reading.steps and step.iteration < reading.steps[-1].iteration:
                trainings.append(_Training(LogReading(begin=at)))
                reading = trainings[-1].reading
            reading.steps.append(step)
            trainings[-1].date(line)
            reading.after, reading.planned = at + 1, _planned(line)
            if length := _SEQUENCE.search(line):
                reading.cells["seq_len"] = int(length[1])
            if _EXPERTS_LOSS.search(line):
                trainings[-1].mixture = mixture("load_balancing_loss", "logged")
        elif at in configured:
            _not_begun(trainings, at).arguments |= configured[at]
        elif not is_engine_setting(line) and (argument := _argument(line)):
            name, value = argument
            if reading.steps and name in arguments:
                trainings.append(_Training(LogReading(begin=at, after=at)))
            trainings[-1].arguments[name] = value
        elif world := _WORLD.search(line):
            _not_begun(trainings, at).reading.cells |= _degrees(world[0])
        else:
            _add_size(line, reading)
    for training in trainings:
        training.finish(deepspeed)
    return drafts_of_trainings([training.reading for training in trainings], lines, given)


def _not_begun(trainings: list[_Training], at: int) -> _Training:
    """The training that a line `at` tells of ahead of its steps: the last, or another where that has made some."""
    if trainings[-1].reading.steps:
        trainings.append(_Training(LogReading(begin=at, after=at)))
    return trainings[-1]


def _add_size(line: str, reading: LogReading) -> None:
    """The vocabulary, and the most that each rank had reserved, where a line says so."""
    if vocab := _VOCAB.search(line):
        reading.cells["vocab"] = int(vocab[1])
    gib_by_rank = reading.mem_gib_by_rank
    for rank, unit, reserved in _MEMORY.findall(line) if "memory (" in line else ():
        gib_by_rank[int(rank)] = max(float(reserved) * _GIB[unit], gib_by_rank.get(int(rank), 0.0))


def _degrees(world: str) -> dict[str, Cell]:
    """How many ranks there are and how they share the work, with Ulysses that of sequences too."""
    sizes = {name: int(size) for name, size in _WORLD_SIZES.findall(world)}
    cells: dict[str, Cell] = {column: sizes[name] for name, column in _WORLD_COLUMNS.items() if name in sizes}
    if (ulysses := sizes.get("sequence-parallel", 1)) > 1:
        cells |= {"cp": ulysses, "cp_kind": "ulysses"}
    return cells


@dataclass
class _Training:
    """One training of a log: what is read of it, its arguments, what tells of experts, and two steps' time stamps.

    `newer` says whether its lines are of 2024 or later.
    """

    reading: LogReading
    arguments: dict[str, str] = field(default_factory=dict)
    mixture: str = ""
    stamps: list[re.Match[str] | None] = field(default_factory=list)
    newer: bool = False

    def date(self, line: str) -> None:
        """What the line of one of the first two steps tells of when it was made, and by software of when."""
        if len(self.reading.steps) <= 2:
            self.stamps.append(_STAMP.search(line))
            self.newer = _NEWER.search(line) is not None

    def finish(self, deepspeed: bool) -> None:
        """State what follows from all of it."""
        reading = self.reading
        reading.mixture = self.mixture
        self._without_the_first()
        set_up(reading, self.arguments)
        deepspeed = deepspeed or self.arguments.get("deepspeed") == "True"
        # context parallelism came with Megatron-Core 0.5 (megatron/training/arguments.py, --context-parallel-size)
        newer = self.newer and "tensor_model_parallel_size" not in self.arguments
        today = "context_parallel_size" in self.arguments or "cp" in reading.cells or newer
        reading.guesses["stack"] = stack_of(self.arguments, reading.cells, deepspeed=deepspeed, today=today)
        reading.formula = "" if deepspeed else "model_flops"
        if reading.mem_gib_by_rank:
            reading.notes.append("memory is the most that PyTorch had reserved")

    def _without_the_first(self) -> None:
        """Take the first iteration out of the second line, where the clock of the lines shows that it counts there too.

        Since January 2026 the first line does not reset Megatron-LM's timer (training_log in
        megatron/training/training.py, `should_reset`), so that the second one's mean has the start-up in it.
        """
        stamp, later = (*self.stamps[:2], None, None)[:2]
        begun, ended = clock_of(stamp), clock_of(later)
        off = _SHORT_TICK_S if stamp and stamp[2] else _TICK_S
        if begun is None or ended is None or ended - begun < off:
            return
        first, second = self.reading.steps[:2]
        made, passed, mean = second.iteration - first.iteration, ended - begun, second.sec_per_it
        if first.sec_per_it is None or mean is None or made < 1:
            return
        seconds = (mean * (made + 1) - first.sec_per_it) / made
        if mean * made > passed + off and seconds > 0 and abs(seconds * made - passed) <= off + _BESIDE * passed:
            tflops, tokens = (
                None if rate is None else rate * mean / seconds
                for rate in (second.tflops, second.tokens_per_s_per_device)
            )
            self.reading.steps[1] = replace(second, sec_per_it=seconds, tflops=tflops, tokens_per_s_per_device=tokens)
            said = f"iteration {second.iteration} is timed without the first, which its line counts too"
            self.reading.notes.append(said)


def times_by_tflops(lines: Iterable[str]) -> dict[float, float]:
    """Seconds of the log lines among `lines`, by the TFLOPs that each prints."""
    steps = [step for step in map(_step, lines) if step is not None]
    return {s.tflops: s.sec_per_it for s in steps if s.tflops is not None and s.sec_per_it is not None}


def _argument(line: str) -> tuple[str, str] | None:
    """Name and value of an argument that the line prints."""
    if " ." not in line and "  " not in line:  # which most lines of a large log are told by in a tenth of the time
        return None
    match = _ARGUMENT.search(line)
    if match is None or (len(match[2]) < 3 and match[1] not in NAMES):
        return None
    return match[1], _CHANGED.sub("", match[3])


def _planned(line: str) -> int | None:
    match = _ITERATION.search(line)
    return int(match[2]) if match is not None and match[2] != "infinity" else None


def _step(line: str) -> Step | None:
    # where two steps were written into one line, the last is whole
    match = max(_ITERATION.finditer(line), key=re.Match.start, default=None) if "iteration" in line else None
    if match is None:
        return None
    fields = {}
    for part in line[match.end() :].split("|")[:-1]:  # behind the last bar stands nothing, or what was cut off
        if pair := _FIELD.match(part):
            fields[pair[1].replace("_", " ")] = pair[2]
    seconds = _first(fields, "elapsed time per iteration (s)")
    if seconds is None:
        milliseconds = _first(fields, "elapsed time per iteration (ms)", "elapsed time per iteration ms")
        seconds = None if milliseconds is None else milliseconds / 1000.0
    gbs = _first(fields, "global batch size")
    loss = next((fields[name] for name in ("lm loss", "lm-loss") if name in fields), None)
    return Step(
        iteration=int(match[1]),
        sec_per_it=seconds,
        gbs=None if gbs is None else int(gbs),
        loss=None if loss is None else _loss(loss),
        tflops=_first(fields, *_TFLOPS),
        tokens_per_s_per_device=_first(fields, *_TOKENS),
    )


def _loss(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _first(fields: Mapping[str, str], *names: str) -> float | None:
    """The first of the fields that is a finite number."""
    for name in names:
        value = number_of(fields.get(name, "").removesuffix("TFLOPS"))
        if value is not None and math.isfinite(value):
            return value
    return None
