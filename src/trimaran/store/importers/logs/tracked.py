"""Histories of trackers, a point at a time: what each trainer calls its figures there, and the steps that they give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from trimaran.nouns.columns import Cell
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.json_text import number_in
from trimaran.store.importers.logs.steps import LogReading, Step, drafts_of


@dataclass(frozen=True)
class TrackedNames:
    """What a trainer calls its figures; it is known by its loss, or by a step's time.

    `seconds` names times of a step with the seconds of their unit and `memory` what a rank holds with the GiB of its
    unit; of these and of `tflops` the first that is there counts. `steps_per_s` is a rate, over a `window` of steps
    where that is said. A step of the tracker is one of the training where `mark` is tracked too: others call a loss
    alike, and count epochs.
    `over_interval`: times are over the steps of a whole interval of logging, of which fewer may have been made.
    """

    loss: str
    seconds: tuple[tuple[str, float], ...] = ()
    steps_per_s: str = ""
    window: bool = False
    gbs: str = ""
    tflops: tuple[str, ...] = ()
    tokens: str = ""
    memory: tuple[tuple[str, float], ...] = ()
    mark: str = ""
    over_interval: bool = False


_BYTE = 2.0**-30
TRAINERS = (
    # Megatron-LM, megatron/training/training.py, and Megatron-Bridge, whose memory is in units of 1e9 bytes,
    # src/megatron/bridge/training/utils/train_utils.py: training_log
    TrackedNames(
        "lm loss", (("iteration-time", 1.0),), gbs="batch-size", tflops=("throughput", "throughput/tflops/device"),
        memory=(("mem-max-allocated-bytes", _BYTE), ("memory/mem-max-reserved-gigabytes", 1e9 * _BYTE)),
    ),
    # Megatron-DeepSpeed, megatron/training.py, training_log
    TrackedNames("lm-loss-training/lm loss", (("iteration-time/iteration-time", 1.0),), gbs="batch-size/batch-size"),
    # nanotron, src/nanotron/trainer.py, train_step_logs; since 2025 its batch is in tokens, which are no sequences
    TrackedNames(
        "lm_loss", (("time_per_iteration_ms", 1e-3),), tflops=("model_tflops_per_gpu",), tokens="tokens_per_sec_per_gpu"
    ),
    TrackedNames(
        "lm_loss", (("elapsed_time_per_iteration_ms", 1e-3), ("sec_per_it", 1.0)), gbs="global_batch_size",
        tflops=("model_tflops_per_gpu",), tokens="tokens_per_sec_per_gpu",
    ),
    # torchtitan, torchtitan/components/metrics.py, MetricsProcessor.log
    TrackedNames(
        "loss_metrics/global_avg_loss", (("time_metrics/end_to_end(s)", 1.0),), tflops=("tflops",),
        tokens="throughput(tps)", memory=(("memory/max_reserved(GiB)", 1.0),), over_interval=True,
    ),
    # OLMo-core, src/olmo_core/train/callbacks/speed_monitor.py
    TrackedNames(
        "train/CE loss", steps_per_s="throughput/device/BPS", tokens="throughput/device/TPS",
        tflops=("throughput/device/TFLOPs_per_GPU",),
        memory=(("gpu_memory/GPU active mem (GiB)", 1.0), ("system/GPU active mem (GiB)", 1.0)),
    ),
    # Composer, composer/callbacks/speed_monitor.py and memory_monitor.py (in units of 1e9 bytes)
    TrackedNames(
        "loss/train/total", (("time/secs_per_step", 1.0),), steps_per_s="throughput/batches_per_sec", window=True,
        memory=(("memory/peak_reserved_mem", 1e9 * _BYTE),),
    ),
    # NeMo, nemo/utils/exp_manager.py, TimingCallback, and nemo/lightning/pytorch/strategies/megatron_strategy.py
    TrackedNames(
        "reduced_train_loss", (("train_step_timing in s", 1.0),), gbs="global_batch_size", tflops=("TFLOPS_per_GPU",),
        memory=(("max_memory_reserved", _BYTE), ("peak_memory_usage", _BYTE)),
    ),
    # Levanter, and Hugging Face's Trainer, which times no step (transformers, integrations/integration_utils.py)
    TrackedNames("train/loss", (("throughput/duration", 1.0),), mark="train/epoch"),
    # Lightning, whose loggers tell the epoch beside what a module logs
    TrackedNames("train_loss", mark="epoch"),
)  # fmt: skip
# Where a tracker's own step counts what is tracked, these count steps of the training.
OWN_STEPS = ("trainer/global_step", "train/global_step", "global_step", "iteration")


@dataclass(frozen=True)
class Point:
    """Figures that were tracked together: at which step, when, and in which start; whether the trainer counts steps."""

    step: int
    figures: Mapping[str, object]
    counted: bool = False
    clock: float | None = None
    start: int = 0


@dataclass
class _Merged:
    """All figures of one step of one start."""

    step: int
    start: int
    counted: bool
    clock: float | None
    figures: dict[str, object] = field(default_factory=dict)


def names_in(names: Sequence[str] | set[str]) -> TrackedNames | None:
    """The trainer whose names these are: by its loss, of those that call it alike the one whose time is told.

    A rate alone tells none: litgpt counts micro-batches of all devices under the name of Composer's batches.
    """
    known = set(names)
    timed = [each for each in TRAINERS if known & {name for name, _ in each.seconds}]
    told = [each for each in TRAINERS if each.loss in known]
    return next((each for each in told if each in timed), next(iter([*told, *timed]), None))


def last_step(number: int, figures: Mapping[str, object], trainer: TrackedNames) -> tuple[Step, float]:
    """The step that a trainer tracked last, and what its rank held of memory, in GiB (0: not tracked)."""
    gbs = _first(figures, ((trainer.gbs, 1.0),))
    step = Step(
        number,
        _seconds(figures, trainer),
        int(gbs) if gbs is not None and gbs >= 1 else None,
        _loss(figures.get(trainer.loss)),
        _first(figures, tuple((name, 1.0) for name in trainer.tflops)),
        _first(figures, ((trainer.tokens, 1.0),)),
    )
    return step, _first(figures, trainer.memory) or 0.0


def drafts_of_points(points: Sequence[Point], given: Mapping[str, Cell]) -> list[Draft]:
    """The rows of a history. Shape and layout stand in none: the user states them.

    A step's time is what the trainer tracked, or by the clock of its points. The first step of a further start, which
    carries the start-up, has none, and steps that were made again count as they were made last.
    """
    reading = LogReading()
    names = {name for point in points for name in point.figures}
    trainer = names_in(names)
    if trainer is None:
        known = ", ".join(dict.fromkeys(each.loss for each in TRAINERS))
        reading.refusal = f"no loss or time of a step is tracked under a name that is known ({known})"
        return drafts_of(reading, (), given)
    merged = _by_step(points, trainer)
    if trainer.over_interval:
        _over_steps_made(merged, trainer)
    marked = (trainer.mark or trainer.loss) in names
    timed = any(_seconds(at.figures, trainer) for at in merged)
    by_window = timed and trainer.window and not any(_first(at.figures, trainer.seconds) for at in merged)
    reading.sampled = timed
    batches = _batches(points, trainer)
    before: _Merged | None = None
    for at in merged:
        again = before is not None and (at.start != before.start or at.step <= before.step)
        if again:
            reading.notes.append(f"started again before iteration {at.step}")
        while reading.steps and reading.steps[-1].iteration >= at.step:
            reading.steps.pop()
        seconds = _seconds(at.figures, trainer) if timed else _since(before, at, marked)
        reading.steps.append(
            Step(
                at.step,
                None if again else seconds,
                batches.get((at.start, at.step)),
                _loss(at.figures.get(trainer.loss)),
                _first(at.figures, tuple((name, 1.0) for name in trainer.tflops)),
                _first(at.figures, ((trainer.tokens, 1.0),)),
            )
        )
        if memory := _first(at.figures, trainer.memory):
            reading.mem_gib_by_rank[0] = max(memory, reading.mem_gib_by_rank.get(0, 0.0))
        before = at
    if by_window:
        reading.notes.append("each time is the mean over a window of steps, so that they overlap")
    if not timed and any(step.sec_per_it for step in reading.steps):
        reading.notes.append("times by the clock of the points, evaluations and checkpoints included")
    return drafts_of(reading, (), given)


def _by_step(points: Sequence[Point], trainer: TrackedNames) -> list[_Merged]:
    """Points with a figure of the training, those of one step as one."""
    wanted = {trainer.loss, trainer.steps_per_s, trainer.tokens} - {""}
    wanted |= {*trainer.tflops, *(name for name, _ in (*trainer.seconds, *trainer.memory))}
    merged: list[_Merged] = []
    places: dict[tuple[int, int], int] = {}
    for point in points:
        if not wanted & point.figures.keys():
            continue
        place = places.get((point.start, point.step))
        # a step that comes again after a later one is made again, where its loss is told again
        if place is None or (trainer.loss in point.figures and trainer.loss in merged[place].figures):
            places[point.start, point.step] = place = len(merged)
            merged.append(_Merged(point.step, point.start, point.counted, point.clock))
        merged[place].figures |= point.figures
    return merged


def _over_steps_made(merged: Sequence[_Merged], trainer: TrackedNames) -> None:
    """Set right the times of intervals in which fewer steps were made: the first ones, and those behind an evaluation.

    A time over a whole interval by the tokens a second, which are of the steps made, is the tokens of a step where all
    were, and less elsewhere (torchtitan 0.2.2, components/metrics.py, MetricsProcessor.log). The first of a training
    is of its first step alone, and the second one's step is how long an interval is.
    """
    (name, unit), *_ = trainer.seconds
    for _, points in groupby(merged, key=lambda at: at.start):
        at = list(points)
        rates = [_first(each.figures, ((trainer.tokens, 1.0),)) for each in at]
        times = [_first(each.figures, ((name, unit),)) for each in at]
        tokens = [seconds * rate for seconds, rate in zip(times, rates, strict=True) if seconds and rate]
        if len(at) > 1 and at[0].step == 1 and at[1].step > 2 and times[0] and rates[0]:
            tokens.append(times[0] * rates[0] * at[1].step)
        for each, rate in zip(at, rates, strict=True):
            if rate and tokens and name in each.figures:
                each.figures[name] = max(tokens) / rate / unit


def _batches(points: Sequence[Point], trainer: TrackedNames) -> dict[tuple[int, int], int]:
    """The global batch by start and step. It makes no step by itself, and event files hold it as a point of its own."""
    told = ((point, _first(point.figures, ((trainer.gbs, 1.0),))) for point in points)
    return {(point.start, point.step): int(gbs) for point, gbs in told if gbs is not None and gbs >= 1}


def _seconds(figures: Mapping[str, object], trainer: TrackedNames) -> float | None:
    if seconds := _first(figures, trainer.seconds):
        return seconds
    rate = _first(figures, ((trainer.steps_per_s, 1.0),))
    return 1.0 / rate if rate else None


def _since(before: _Merged | None, at: _Merged, marked: bool) -> float | None:
    """Seconds a step since the step tracked before, where they are steps of the training and both have a clock."""
    if (
        before is None
        or not (at.counted or marked)
        or at.clock is None
        or before.clock is None
        or at.step <= before.step
    ):
        return None
    took = (at.clock - before.clock) / (at.step - before.step)
    return took if 0 < took < 1e9 else None


def _first(figures: Mapping[str, object], names: tuple[tuple[str, float], ...]) -> float | None:
    found = ((number_in(figures, name), unit) for name, unit in names if name)
    return next((value * unit for value, unit in found if value is not None and value > 0), None)


def _loss(value: object) -> float | None:
    if isinstance(value, float) and not math.isfinite(value):
        return math.nan
    return number_in({"": value}, "")
