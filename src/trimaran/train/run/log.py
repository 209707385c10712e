"""Log: one line an iteration for people, in the words of Megatron-DeepSpeed's logs, and one in JSON."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

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

    @property
    def validation_perplexity(self) -> float | None:
        """Between how many equally likely tokens the model as good as chooses."""
        return None if self.validation_loss is None else perplexity(self.validation_loss)

    def line(self) -> str:
        """The line for people; its first fields are named and ordered as BLOOM's logs have them."""
        fields = [
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
        fields += [
            f"{words}: {figure:{form}}"
            for words, figure, form in (
                ("busiest expert's load over the mean", self.busiest_expert, ".3f"),
                ("load balancing loss", self.balance_loss, ".6E"),
                ("z loss", self.router_z_loss, ".6E"),
            )
            if figure is not None
        ]
        if self.departures:
            fields.append(f"another loss than other layouts: {self.departures}")
        if self.validation_loss is not None:
            fields.append(f"validation loss: {self.validation_loss:.6E}")
            fields.append(f"validation perplexity: {self.validation_perplexity:.6E}")
        return " " + " | ".join(fields) + " |"


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
    def of(cls, records: Sequence[dict[str, Any]]) -> Self:
        """What the lines of an earlier log say."""

        def number(record: dict[str, Any], name: str) -> float:
            return math.nan if record[name] is None else record[name]

        return cls(
            [record["sec_per_it"] for record in records],
            [number(record, "lm_loss") for record in records],
            [number(record, "grad_norm") for record in records],
            records[-1]["skipped_iterations"] if records else 0,
            records[-1]["nan_iterations"] if records else 0,
            validations={r["iteration"]: r["validation_loss"] for r in records if r.get("validation_loss") is not None},
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


class Log:
    """`log.txt` and `log.jsonl` in a folder; every line is out of this process before the next iteration begins.

    A resumed training's log begins with the lines of the earlier one up to the step it goes on from, where that
    has them all. The recipe's trackers are told the same. Raises TrimaranError for a tracker that is not installed.
    """

    def __init__(self, job: TrainJob, step: int) -> None:
        folder, earlier = Path(job.out_dir), job.earlier_log
        config = {"layout": job.layout.label(), **job.workload.model.model_dump(), **job.train.model_dump()}
        self._trackers = open_trackers(job.train.track, folder, config) if job.track else ()
        self._text = LineFile(RunFile.LOG_TEXT.of(folder))
        self._json = LineFile(RunFile.LOG.of(folder))
        self.earlier: list[dict[str, Any]] = []
        if earlier is not None and step:
            self._begin_with(Path(earlier), step)

    def _begin_with(self, earlier: Path, step: int) -> None:
        try:
            lines = earlier.read_text().splitlines()
            text = RunFile.LOG_TEXT.of(earlier.parent).read_text().splitlines()
        except OSError:
            return
        records = list(_parsed(lines))
        places = standing([record["iteration"] for record in records])[:step]
        if len(text) < len(records):
            return
        lines, text = [lines[place] for place in places], [text[place] for place in places]
        records = [records[place] for place in places]
        if [record["iteration"] for record in records] == list(range(1, step + 1)):
            self.earlier = records
            self._json.write("".join(f"{line}\n" for line in lines))
            self._text.write("".join(f"{line}\n" for line in text))
            for record in records:
                self._track(record)

    def write(self, iteration: Iteration) -> None:
        """Append one iteration to both files. JSON says null for a loss or norm that is not finite."""
        self._text.write(iteration.line() + "\n")
        fields = asdict(iteration) | {"validation_perplexity": iteration.validation_perplexity}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        self._json.write(json.dumps(finite | {"flops_formula": OWN_FORMULA}, allow_nan=False) + "\n")
        self._track(finite)

    def _track(self, record: dict[str, Any]) -> None:
        for tracker in self._trackers:
            with contextlib.suppress(OSError):  # where its disk is full, it lacks this step
                tracker.write(record["iteration"], figures_of(record))


def _parsed(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The iterations of a log, up to a line that was cut off as the training was killed."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
            return
        yield record
