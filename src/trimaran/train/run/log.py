"""Log: one line an iteration for people, in the words of Megatron-DeepSpeed's logs, and one in JSON."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from trimaran.layout.flops import OWN_FORMULA, mfu, tflops_per_device
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob
from trimaran.protocol.line_file import LineFile
from trimaran.protocol.steps_log import standing
from trimaran.train.engine.trainer import StepResult, Trainer
from trimaran.train.run.trackers import figures_of, open_trackers


@dataclass(frozen=True)
class Iteration:
    """What one iteration showed. Counts of samples and tokens are those consumed so far.

    `own_s` are seconds of the iteration before in which a rank did not wait for others: the median of all ranks, and
    those of the slowest. `departures` are choices of the layout that make the loss another. Of a mixture `expert_load`
    (layers with experts, experts) are the tokens that each expert was sent, over the mean.
    """

    iteration: int
    iterations: int
    consumed_samples: int
    consumed_tokens: int
    sec_per_it: float
    learning_rate: float
    global_batch: int
    lm_loss: float
    loss_scale: float
    grad_norm: float
    num_zeros: int
    skipped_iterations: int
    nan_iterations: int
    samples_per_s: float
    tflops: float
    tokens_per_s: float
    mfu: float | None
    peak_mem_gib: float
    own_s: float
    slowest_own_s: float
    slowest_rank: int
    departures: str | None = None
    validation_loss: float | None = None
    busiest_expert: float | None = None
    balance_loss: float | None = None
    router_z_loss: float | None = None
    expert_load: tuple[tuple[float, ...], ...] | None = None

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        """What `record` was made of; raises KeyError and TypeError for one that lacks a figure or is none.

        A number that was not finite is then not a number.
        """
        known = [each for each in fields(cls) if each.default is MISSING or each.name in record]
        figures = {each.name: record[each.name] for each in known}
        return cls(
            **figures | {each.name: math.nan for each in known if each.type == "float" and figures[each.name] is None}
        )

    def record(self) -> dict[str, Any]:
        """The line for programs: JSON says null for a number that is not finite."""
        figures = asdict(self) | {"validation_perplexity": self.validation_perplexity}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
        return finite | {"flops_formula": OWN_FORMULA}

    @property
    def validation_perplexity(self) -> float | None:
        """Between how many equally likely tokens the model as good as chooses."""
        return None if self.validation_loss is None else perplexity(self.validation_loss)

    def line(self) -> str:
        """The line for people; its first fields are named and ordered as BLOOM's logs have them."""
        figures = [
            f"iteration {self.iteration:8d}/{self.iterations:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"consumed tokens: {self.consumed_tokens:12d}",
            f"elapsed time per iteration (s): {self.sec_per_it:.4g}",
            f"learning rate: {self.learning_rate:.3E}",
            f"global batch size: {self.global_batch:5d}",
            f"lm loss: {self.lm_loss:.6E}",
            f"loss scale: {self.loss_scale:.1f}",
            f"grad norm: {self.grad_norm:.3f}",
            f"num zeros: {float(self.num_zeros):.1f}",
            f"number of skipped iterations: {self.skipped_iterations:3d}",
            f"number of nan iterations: {self.nan_iterations:3d}",
            f"samples per second: {self.samples_per_s:.3f}",
            f"TFLOPs: {self.tflops:.4g}",
            f"tokens per second: {self.tokens_per_s:.1f}",
            f"MFU: {'unknown' if self.mfu is None else f'{100 * self.mfu:.1f}%'}",
            f"peak memory (GiB): {self.peak_mem_gib:.3f}",
        ]
        figures += [
            f"{words}: {figure:{form}}"
            for words, figure, form in (
                ("busiest expert's load over the mean", self.busiest_expert, ".3f"),
                ("load balancing loss", self.balance_loss, ".6E"),
                ("z loss", self.router_z_loss, ".6E"),
            )
            if figure is not None
        ]
        if self.departures:
            figures.append(f"another loss than other layouts: {self.departures}")
        if self.validation_loss is not None:
            figures.append(f"validation loss: {self.validation_loss:.6E}")
            figures.append(f"validation perplexity: {self.validation_perplexity:.6E}")
        return " " + " | ".join(figures) + " |"


def perplexity(loss: float) -> float:
    """Exponential of a mean loss in nats."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass
class History:
    """Figures of all iterations so far, those before a resumption included."""

    sec_per_it: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0
    not_finite: int = 0
    last: StepResult | None = None
    validations: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Sequence[Iteration]) -> Self:
        """What the lines of an earlier log say."""
        return cls(
            [line.sec_per_it for line in lines],
            [line.lm_loss for line in lines],
            [line.grad_norm for line in lines],
            lines[-1].skipped_iterations if lines else 0,
            lines[-1].nan_iterations if lines else 0,
            validations={line.iteration: line.validation_loss for line in lines if line.validation_loss is not None},
        )

    def add(self, result: StepResult, sec_per_it: float) -> None:
        """Take one iteration."""
        self.sec_per_it.append(sec_per_it)
        self.losses.append(result.loss)
        self.grad_norms.append(result.grad_norm)
        self.skipped += result.skipped
        # a gradient too large for fp16 skips a step too, and that is in order
        self.not_finite += not math.isfinite(result.loss)
        self.last = result

    def go_back(self, steps: int) -> None:
        """Forget the last `steps` iterations, which will be made again."""
        first = max(0, len(self.sec_per_it) - steps)
        for figures in (self.sec_per_it, self.losses, self.grad_norms):
            del figures[first:]

    def add_validation(self, step: int, loss: float) -> None:
        """Take a validation after `step` iterations."""
        self.validations[step] = loss


def iteration_of(trainer: Trainer, history: History, peak_mem_gib: float) -> Iteration:
    """What the last iteration showed, with the rates that follow from its time."""
    job, last = trainer.job, history.last
    assert last is not None, "there is an iteration to tell of"
    layout, workload, sec_per_it = job.layout, job.workload, history.sec_per_it[-1]
    own_s = last.own_s
    slowest = max(range(len(own_s)), key=lambda rank: own_s[rank])
    seen = workload.model_copy(update={"global_batch": last.global_batch, "ramp_up": None})
    peak = job.peak_tflops
    return Iteration(
        iteration=trainer.step_number,
        iterations=job.steps,
        consumed_samples=trainer.consumed_samples,
        consumed_tokens=trainer.consumed_samples * workload.seq_len,
        sec_per_it=sec_per_it,
        learning_rate=last.learning_rate,
        global_batch=last.global_batch,
        lm_loss=last.loss,
        loss_scale=last.loss_scale,
        grad_norm=last.grad_norm,
        num_zeros=last.zeros,
        skipped_iterations=history.skipped,
        nan_iterations=history.not_finite,
        samples_per_s=last.global_batch / sec_per_it,
        tflops=tflops_per_device(seen, layout.tp, layout.devices, sec_per_it, OWN_FORMULA),
        tokens_per_s=seen.tokens_per_step / sec_per_it,
        mfu=None if peak is None else mfu(seen, layout.tp, layout.devices, sec_per_it, peak),
        peak_mem_gib=peak_mem_gib,
        own_s=statistics.median(own_s),
        slowest_own_s=own_s[slowest],
        slowest_rank=slowest,
        departures=layout.departures or None,
        validation_loss=history.validations.get(trainer.step_number),
        **_load_figures(last),
    )


def _load_figures(result: StepResult) -> dict[str, Any]:
    """The figures of a mixture's experts; none of a dense model's."""
    load = result.load
    if load is None:
        return {}
    return {
        "busiest_expert": load.busiest,
        "balance_loss": load.balance_loss,
        "router_z_loss": load.z_loss,
        "expert_load": tuple(tuple(round(expert, 4) for expert in layer) for layer in load.of_layers),
    }


class _Earlier(NamedTuple):
    """Lines of an earlier log that stand: where each begins in the file, and what it says but for experts' loads."""

    log: str
    begins: list[int]
    lines: list[Iteration]


class Log:
    """`log.txt` and `log.jsonl` in a folder; every line is out of this process before the next iteration begins.

    A resumed training's log begins with the lines of an earlier one up to the step it goes on from: the newest that
    has them all, else the one that has most. The recipe's trackers are told the same, each line of which is a sign
    of life (`alive`). Raises TrimaranError for a tracker that is not installed.
    """

    def __init__(self, job: TrainJob, step: int, alive: Callable[[], None] = lambda: None) -> None:
        folder = Path(job.out_dir)
        config = {"layout": job.layout.label(), **job.workload.model.model_dump(), **job.train.model_dump()}
        self._trackers = open_trackers(job.train.track, folder, config) if job.track else ()
        self._text = LineFile(RunFile.LOG_TEXT.of(folder))
        self._json = LineFile(RunFile.LOG.of(folder))
        earlier = _fullest(job.earlier_logs, step)
        self.earlier = earlier.lines
        self._go_on_from(earlier, alive)

    def write(self, iteration: Iteration) -> None:
        """Append one iteration to both files."""
        self._append([iteration])

    def _go_on_from(self, earlier: _Earlier, alive: Callable[[], None]) -> None:
        """Append the lines of an earlier log, each read again: all experts' loads of a long training fill a memory."""
        if not earlier.begins:
            return
        with Path(earlier.log).open("rb") as file:
            for begin in earlier.begins:
                file.seek(begin)
                self._append([Iteration.of(json.loads(file.readline()))], alive)

    def _append(self, iterations: Sequence[Iteration], alive: Callable[[], None] = lambda: None) -> None:
        records = [iteration.record() for iteration in iterations]
        self._text.write("".join(iteration.line() + "\n" for iteration in iterations))
        self._json.write("".join(json.dumps(record, allow_nan=False) + "\n" for record in records))
        for record in records:
            alive()
            for tracker in self._trackers:
                # where its disk is full or its server away, it lacks this step; each library has errors of its own
                with contextlib.suppress(Exception):
                    tracker.write(record["iteration"], figures_of(record))


def _fullest(logs: Sequence[str], step: int) -> _Earlier:
    """The lines up to `step` of the first log that has them all, else of that with most: a full disk cuts logs off."""
    most = _Earlier("", [], [])
    for log in logs if step else ():
        with contextlib.suppress(OSError):
            read = list(_parsed(Path(log)))
            stand = (read[place] for place in standing([line.iteration for _, line in read]))
            kept = [(begin, line) for begin, line in stand if line.iteration <= step]
            if len(kept) > len(most.lines):
                most = _Earlier(log, [begin for begin, _ in kept], [line for _, line in kept])
        if len(most.lines) == step:
            break
    return most


def _parsed(log: Path) -> Iterator[tuple[int, Iteration]]:
    """Where each line of a log begins, and its iteration, up to a line that was cut off as the training was killed."""
    begin = 0
    with log.open("rb") as file:
        for line in file:
            try:
                yield begin, replace(Iteration.of(json.loads(line)), expert_load=None)
            except (ValueError, TypeError, KeyError):
                return
            begin += len(line)
