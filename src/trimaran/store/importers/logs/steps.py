"""Steps: what the lines of a training log show, and the rows drawn from them."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import get_args

from trimaran.nouns.columns import BY_NAME, Cell, parse_cell
from trimaran.nouns.stack import Optimizer
from trimaran.store.importers.calculators import fitting_formulas, resolve_family
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.text import clock_of, number_of

_EVIDENCE_LINES, _EVIDENCE_WIDTH = 40, 500
# The share of the intervals between logged steps that makes one the usual one.
_USUAL = 0.75


@dataclass(frozen=True)
class Step:
    """One logged iteration. A figure that the log does not print is None; `gbs` in sequences, a loss may be NaN."""

    iteration: int
    sec_per_it: float | None = None
    gbs: int | None = None
    loss: float | None = None
    tflops: float | None = None
    tokens_per_s_per_device: float | None = None


@dataclass
class LogReading:
    """All that a log says: cells of the set-up, steps, memory by rank (GiB), remarks.

    `guesses` hold where neither the log nor the user says otherwise; `formula` is the calculator that
    the trainer is known for, taken where it gives the TFLOPs printed. `begin` is the line where it starts, and
    `after` that behind the last step, where the reason for an early end stands. `planned` is the last iteration that
    was asked for. `refusal` is why the log gives no row, `mixture` why it gives none unless the experts are known from
    elsewhere. `suspect` says why its times are not to be believed. A time is the mean since the step logged before,
    unless times are `sampled`: those of single steps, of which not all are logged.
    """

    cells: dict[str, Cell] = field(default_factory=dict)
    guesses: dict[str, Cell] = field(default_factory=dict)
    formula: str = ""
    refusal: str = ""
    mixture: str = ""
    suspect: str = ""
    sampled: bool = False
    begin: int = 0
    after: int = 0
    planned: int | None = None
    steps: list[Step] = field(default_factory=list)
    mem_gib_by_rank: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# What the last lines of a run that did not end well say, and whether that counts behind a stop too. The first that is
# found counts: a node that is lost leaves the others waiting for it, and a rank that is, has them complain of the
# network.
_ENDINGS = (
    ("oom", True, re.compile(r"out of memory|OutOfMemoryError|oom-kill|oom_kill", re.IGNORECASE)),
    ("fail", True, re.compile(r"DUE TO (?:NODE FAILURE|PREEMPTION)|error: Node failure on")),
    (
        "hang",
        True,
        re.compile(r"watchdog caught collective|collective operation timeout|watchdog got stuck", re.IGNORECASE),
    ),
    (
        "crash",
        False,
        re.compile(r"Segmentation fault|SIGSEGV|SIGABRT|SIGKILL|Bus error|\btasks? [\d,-]{1,200}: (?:Killed|Abort)"),
    ),
    (
        "fail",
        False,
        re.compile(
            r"Traceback \(most recent call last\)|RuntimeError|AssertionError|ChildFailedError|DistBackendError"
            r"|NCCL error|\btasks? [\d,-]{1,200}: Exited with exit code [1-9]"
        ),
    ),
)
# A time as trainers print it, to the millisecond or to the second; OLMo-core's metrics follow it in lines of their own.
_STAMP = re.compile(r"\b(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](\d{3}))?")
_STAMP_WITHIN = 300
# A number behind which the text ends.
_TORN = re.compile(r"(?<![\d.,])[-+]?\d[\d.,eE+-]{0,40}\Z")
# How somebody stops a run, whose figures are as good as any: Slurm at its limit, as several jobs are ended, or as
# its user asks; a signal to torchrun (torch/distributed/elastic/multiprocessing/api.py, _terminate_process_handler).
_STOPS = (
    ("Slurm's time limit ended the run", re.compile(r"CANCELLED AT .{0,80}DUE TO TIME LIMIT")),
    ("the run was cancelled", re.compile(r"CANCELLED AT [\d:T-]{1,40} \*\*\*")),
    (
        "a signal ended the run",
        re.compile(r"death signal, shutting down workers|SignalException: Process \d{1,9} got signal: (?:1|2|15)\b"),
    ),
    ("Ctrl-C ended the run", re.compile(r"^(?:\[\w{1,20}\d{1,7}\]: ?)?KeyboardInterrupt\b")),
)
# A line of a traceback above the error that it ends in, of any rank.
_OF_TRACEBACK = re.compile(r"(?:\[\w{1,20}\d{1,7}\]: ?)?(?:\s|$|(?:\^C)?Traceback \(most recent call last\))")


# Axes that a trainer which names its tensor and pipeline degrees, but not these, does not have.
_UNNAMED_AXES: dict[str, Cell] = {"vpp": 1, "cp": 1, "schedule": "none"}


def ending(lines: Sequence[str]) -> tuple[str, str | None]:
    """How the run ended by its log, with the lines that say so; ok where nothing speaks against it.

    What ranks say behind a stop is what the stop did to them.
    """
    stopped, _ = _stop(lines)
    for status, behind_a_stop, words in _ENDINGS:
        for at, line in enumerate(lines if behind_a_stop else lines[:stopped]):
            if words.search(line):
                kept = lines[max(0, at - 2) : at + _EVIDENCE_LINES - 2]
                return status, "\n".join(said[:_EVIDENCE_WIDTH] for said in kept)
    return "ok", None


def _stop(lines: Sequence[str]) -> tuple[int, str]:
    """The line from which on somebody stopped the run, and how; behind all lines where nobody did."""
    for at, line in enumerate(lines):
        if said := next((said for said, words in _STOPS if words.search(line)), ""):
            first = at
            while first and _OF_TRACEBACK.match(lines[first - 1]):
                first -= 1
            return first, said
    return len(lines), ""


def whole(text: str) -> str:
    """A log without the number that its last line ends in, where that line has no end: it may be written on."""
    last = text[text.rfind("\n") + 1 :]
    torn = _TORN.search(last)
    return text[: len(text) - len(last) + torn.start()] if torn and ending([last])[0] == "ok" else text


def stated_cell(column: str, text: str) -> Cell:
    """A cell that the log's settings state; None for a number that makes no sense in the table.

    A word that the table does not know stays as it is, so that its row is refused by it.
    """
    try:
        return parse_cell(BY_NAME[column], text)
    except ValueError:
        return text if BY_NAME[column].kind == "text" else None


def drafts_of(reading: LogReading, lines: Sequence[str], given: Mapping[str, Cell]) -> list[Draft]:
    """One row for each global batch that the log went through, in order; one in all where none was timed.

    Sec/it is the median of the steps after the first, which carries the start-up, or that of the one there is.
    """
    status, evidence = ending(lines[reading.after :])
    if status != "ok" and _done(reading):
        reading.notes.append(f"all {reading.planned} iterations were done before the log tells of an end by {status}")
        status = "ok"
    drafts = []
    for number, (gbs, group) in enumerate(groupby(_with_batch(reading.steps), key=lambda step: step.gbs), start=1):
        steps = list(group)
        draft = _draft(reading, number)
        draft.cells |= {"gbs": gbs} if gbs else {}
        _close(draft, reading, given)
        _figures(draft, steps, reading)
        if reading.suspect:
            draft.doubt("suspect", reading.suspect)
        drafts.append(draft)
    if not drafts:
        if not (reading.refusal or reading.cells or reading.mem_gib_by_rank or status != "ok"):
            reading.refusal = (
                "it holds no iteration, no setting and no end of a run of this trainer: name another with --as"
            )
        draft = _draft(reading, 1)
        draft.notes.append("no iteration is logged")
        _close(draft, reading, given)
        draft.cells["status"] = "not_run"
        drafts.append(draft)
    last = drafts[-1]
    if reading.steps:
        last.ended = _clock_before(lines, reading.after)
    if status != "ok":
        last.cells["status"], last.extra["evidence"] = status, evidence
    elif stop := _stop(lines[reading.after :])[1]:
        last.notes.append(stop)
    # a device without memory of its own, as a CPU, prints zero
    if memory := {rank: gib for rank, gib in reading.mem_gib_by_rank.items() if gib > 0}:
        last.cells["mem_gib"] = max(memory.values())
        last.extra["mem_gib_per_rank"] = tuple(memory[rank] for rank in sorted(memory))
    return drafts


def _clock_before(lines: Sequence[str], after: int) -> float | None:
    """The time that stands in the last of some lines before `after`."""
    stamps = (_STAMP.search(line) for line in reversed(lines[max(0, after - _STAMP_WITHIN) : after]))
    return next((clock for stamp in stamps if stamp and (clock := clock_of(stamp)) is not None), None)


def parts_of(
    lines: Sequence[str], begins: Callable[[str], object], made: Callable[[str], object]
) -> Iterator[tuple[int, Sequence[str]]]:
    """The lines of each training of a log, and where they begin: behind what the training before `made` last.

    A further training is told by a line behind that by which one `begins`.
    """
    starts, behind = [0], 0
    for at, line in enumerate(lines):
        if behind and begins(line):
            starts.append(behind)
            behind = 0
        elif made(line):
            behind = at + 1
    for begin, end in pairwise([*starts, len(lines)]):
        yield begin, lines[begin:end]


def drafts_of_trainings(readings: Sequence[LogReading], lines: Sequence[str], given: Mapping[str, Cell]) -> list[Draft]:
    """The rows of a log that holds trainings one after the other; one that was started again alike is one training."""
    trainings: list[LogReading] = []
    for reading in readings:
        if trainings and not _other_settings(trainings[-1], reading):
            if reading.steps:
                _go_on(trainings[-1], reading)
                continue
            if ending(lines[reading.begin :])[0] == "ok":
                continue  # it had just been started
        trainings.append(reading)
    ends = [reading.begin for reading in trainings[1:]] + [len(lines)]
    drafts = [d for reading, end in zip(trainings, ends, strict=True) for d in drafts_of(reading, lines[:end], given)]
    for number, draft in enumerate(drafts, start=1):
        draft.row = str(number)
    return drafts


def _other_settings(before: LogReading, reading: LogReading) -> bool:
    """Whether a training states anything else than the one before it; the day that it began on is no setting."""
    stated = ((name, cell) for name, cell in reading.cells.items() if name != "date")
    return before.refusal != reading.refusal or any(before.cells.get(name) != cell for name, cell in stated)


def _go_on(training: LogReading, again: LogReading) -> None:
    """Let a training go on by what it did when started again, whose first step carries the start-up once more."""
    first, *others = again.steps
    training.steps += [replace(first, sec_per_it=None), *others]
    training.after, training.planned = again.after, again.planned
    training.suspect = training.suspect or again.suspect
    for rank, gib in again.mem_gib_by_rank.items():
        training.mem_gib_by_rank[rank] = max(gib, training.mem_gib_by_rank.get(rank, 0.0))
    note = f"started again before iteration {first.iteration}"
    training.notes += [note, *(said for said in again.notes if said not in training.notes)]


def _done(reading: LogReading) -> bool:
    """Whether the last iteration that was planned is logged."""
    return bool(reading.steps) and reading.planned is not None and reading.steps[-1].iteration >= reading.planned


def mixture(trait: str, value: str) -> str:
    """Why a log of a mixture of experts that does not state its experts gives no row, by the trait that tells."""
    return (
        f"{trait} is {value[:40]}: the model is a mixture of experts, of which the log says too little: give --model, "
        f"or --set experts=..., top_k=... and moe_ffn_hidden=..."
    )


# The share of weights that is trained, as PEFT, NeMo's Automodel and ms-swift tell it; less than the second is a part.
_TRAINED = re.compile(
    r"\btrainable params: ([\d,]{1,20}) \|\| all params: ([\d,]{1,20})"
    r"|\bTrainable parameters percentage: (\d{1,3}\.\d{1,6})%|\bM Trainable \[(\d{1,3}\.\d{1,6})%\]"
)
_ALL_PERCENT = 99.5


def trained_in_part(lines: Sequence[str]) -> str:
    """Why a log gives no row where its lines say that adapters, or some of the weights, are trained; else nothing."""
    for line in lines:
        told = _TRAINED.search(line) if "rainable" in line else None
        if told is None:
            continue
        some, of = ((number_of(told[group]) or 0.0) for group in (1, 2))
        percent = 100.0 * some / of if of else float(told[3] or told[4] or 100.0)
        if percent < _ALL_PERCENT:
            return f"{percent:.3g}% of its weights are trained, which no row can say: import a run that trains them all"
    return ""


# In names of Adam's kin that keep other moments: of 8 or 4 bit (bitsandbytes, torchao), of one bit on its way
# (DeepSpeed), a third one (AdEMAMix), or one for many weights (Adam-mini).
_OTHER_MOMENTS = ("bit", "ademamix", "mini")


def optimizer_cell(name: str | None) -> Cell:
    """The table's word for an optimizer (AdamW counts as Adam: it keeps the same moments); another stays as it is.

    So a row of an optimizer that the table does not know is refused by it, as one that keeps smaller moments or more.
    """
    lower = (name or "").lower()
    if any(part in lower for part in _OTHER_MOMENTS):
        return lower
    return next((word for word in get_args(Optimizer) if word in lower), None if lower in ("", "none") else lower)


def _draft(reading: LogReading, number: int) -> Draft:
    return Draft("log", str(number), notes=list(reading.notes), leaves_blank=True, refusal=reading.refusal)


def _with_batch(steps: Sequence[Step]) -> Iterator[Step]:
    """The steps; one whose line was cut off before its batch is of that before it."""
    gbs = None
    for step in steps:
        gbs = step.gbs or gbs
        yield step if step.gbs == gbs else replace(step, gbs=gbs)


def _close(draft: Draft, reading: LogReading, given: Mapping[str, Cell]) -> None:
    """What the log states, then what the user does; then what follows from both."""
    draft.fill(reading.cells)
    draft.fill(given)
    draft.fill(reading.guesses)
    draft.derive()
    if reading.mixture and not any(draft.cells.get(name) for name in ("experts", "model")):
        draft.refusal = reading.mixture
    if draft.cells.get("tp") is not None and draft.cells.get("pp") is not None:
        draft.fill(_UNNAMED_AXES)
    stage = draft.count("zero_stage")
    draft.fill({"dp_kind": None if stage is None else "fully_sharded" if stage == 3 else "all_reduce"})
    resolve_family(draft)


def _interval(steps: Sequence[Step]) -> int:
    """How many iterations lie between two steps that are logged, 1 where that varies.

    The first of a training may be logged beside those of its interval, and a further start may lie between any two.
    """
    gaps = [after.iteration - before.iteration for before, after in pairwise(steps)]
    behind = gaps[1:] or gaps
    usual = statistics.mode(behind) if behind else 1
    return usual if behind.count(usual) >= _USUAL * len(behind) else 1


def _figures(draft: Draft, steps: Sequence[Step], reading: LogReading) -> None:
    times = [step.sec_per_it for step in steps if step.sec_per_it is not None and step.sec_per_it > 0]
    timed = times[1:] or times
    draft.cells["status"] = "ok"
    if not timed:
        draft.notes.append("no time of an iteration is read from the log")
    if timed and not reading.sampled and (interval := _interval(steps)) > 1:
        draft.notes.append(f"each time is the mean of {interval} iterations")
    if timed:
        draft.cells["sec_per_it"] = statistics.median(timed)
        draft.extra["step_times_s"] = tuple(times)
    if len(timed) > 1:
        lower, _, upper = statistics.quantiles(timed, n=4, method="inclusive")
        draft.extra["sec_per_it_spread"] = upper - lower
    losses = [step.loss for step in steps if step.loss is not None]
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < len(losses):
        draft.notes.append(f"{len(losses) - len(finite)} of {len(losses)} logged losses are not finite")
    draft.extra["losses"] = tuple(finite)
    for column, figures in (
        ("tflops", [step.tflops for step in steps if step.tflops is not None]),
        ("tokens_per_s_per_gpu", [s.tokens_per_s_per_device for s in steps if s.tokens_per_s_per_device is not None]),
    ):
        if figures:
            draft.cells[column] = statistics.median(figures[1:] or figures)
    if draft.cells.get("flops_formula") is None:
        fits = fitting_formulas(draft)
        draft.cells["flops_formula"] = (
            reading.formula if reading.formula in fits else fits[0] if len(fits) == 1 else None
        )
