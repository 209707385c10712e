"""Progress of long jobs: a live line on a terminal, plain lines elsewhere; always what remains."""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trimaran.nouns.text import printable

if TYPE_CHECKING:
    from trimaran.bench.sweep import Progress as SweepProgress
    from trimaran.store import Owner
    from trimaran.study.tune.choose import Verdict

console = Console(stderr=True, highlight=False, soft_wrap=True)
# A single step may be a slow one; speed and time left are told by the median of so many.
RECENT_STEPS = 50


def say(text: str) -> None:
    """One line for the user, on standard error."""
    console.print(printable(text), markup=False)


def readable(seconds: float) -> str:
    """A time as people say it: 48 s, 12 min, 3 h 05 min, 2 d 04 h."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    return f"{minutes // 60} h {minutes % 60:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


class _Shown:
    """What shows a live line while its block runs."""

    _bar: Progress

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


class TrialProgress(_Shown):
    """Shows trials as they run: which layout, which step, how many trials and how long remain.

    `total` is the number of trials; a tuning that is certain sooner makes fewer (`at_most`).
    """

    def __init__(self, total: int, *, at_most: bool = False) -> None:
        self._total, self._bound, self._done = total, "at most " if at_most else "", 0
        self._walls: list[float] = []
        self._waits_told: set[str] = set()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[remains]}"), console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, remains="")

    def __call__(self, event: SweepProgress) -> None:
        """Take one event of a sweep."""
        row = event.measurement
        if row is not None:
            self._done += 1
            self._walls += [row.wall_s] if row.wall_s is not None and event.happening != "kept" else []
        remains = ""
        if self._walls and self._done < self._total:
            left_s = -(-(self._total - self._done) // event.at_once) * sum(self._walls) / len(self._walls)
            remains = f"{self._bound or 'about '}{readable(left_s)} left"
        what_runs = f"{event.layout} {event.variant}".rstrip()
        text = f"{what_runs} waits" if event.happening == "waiting" else f"{what_runs} step"
        self._bar.update(self._task, description=text, total=event.steps, completed=event.steps_done, remains=remains)
        if event.holder is not None:
            self._tell_of(event.holder)
        if row is None:
            return
        told = (row.evidence or "").strip().splitlines()[:1]
        failed = ": ".join([row.status, *told])
        what = f"{row.sec_per_it:.3f} s/it, {row.mem_gib or 0:.2f} GiB" if row.sec_per_it else failed
        kept = " (kept from before)" if event.happening == "kept" else ""
        left = f", {remains}" if remains else ""
        say(f"trial {self._done} of {self._bound}{self._total}: {what_runs}: {what}{kept}{left}")

    def _tell_of(self, holder: Owner) -> None:
        """Say whom a sweep waits for: once, and once more where that process has been stopped meanwhile."""
        from trimaran.store import waiting_for

        text = waiting_for(holder, "measures in this store")
        if text not in self._waits_told:
            self._waits_told.add(text)
            say(text)

    def verdict(self, verdict: Verdict) -> None:
        """Take one verdict of a tuning: how likely it is that another layout is faster."""
        if verdict.best is not None and verdict.next is not None and not verdict.certain:
            say(f"  an unmeasured layout may be faster with {verdict.rival_chance:.0%} chance")


class TrainingProgress(_Shown):
    """Shows a training's steps with loss, speed and time left."""

    def __init__(self, steps: int, every: int = 10) -> None:
        self._steps, self._every = steps, every
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._bar = Progress(
            TextColumn("training"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"), console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=steps, loss="")

    def __call__(self, line: dict[str, Any]) -> None:
        """Take one line of the trainer's log."""
        step, loss, seconds = line["iteration"], line["lm_loss"], line["sec_per_it"]
        shown = "not finite" if loss is None else f"{loss:.4f}"
        self._bar.update(self._task, completed=step, loss=f"loss {shown}")
        self._seconds.append(seconds)
        usual = statistics.median(self._seconds)
        validation = line.get("validation_loss")
        if step == 1 or step % self._every == 0 or step == self._steps or validation is not None:
            if validation is not None:
                perplexity = line.get("validation_perplexity")
                shown += f", validation {validation:.4f}" + (f" (perplexity {perplexity:.4g})" if perplexity else "")
            left = f", about {readable((self._steps - step) * usual)} left" if step < self._steps else ""
            say(f"step {step} of {self._steps}: loss {shown}, {usual:.3f} s/it{left}")
