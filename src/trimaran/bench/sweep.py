"""Many trials, one after another, each stored before the next begins."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from trimaran.bench.crew import Crew
from trimaran.bench.launch.contract import Launcher
from trimaran.bench.launchers import launcher_of
from trimaran.bench.trial.room import shortage
from trimaran.bench.trial.trial import Trial, finished_before, not_started, prepare_trial, run_trial, stored
from trimaran.bench.watch.evidence import drop_large_files
from trimaran.bench.watch.limits import Limits
from trimaran.cost.case import Case
from trimaran.layout.layout import Layout
from trimaran.layout.places import nodes_of
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.columns import Status
from trimaran.nouns.measurement import NOT_OF_THE_LAYOUT, Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.variant import PLAIN, Variant
from trimaran.protocol.programs import WORKER
from trimaran.recipe.recipe import Recipe
from trimaran.store import Owner, Store, this_boot

Happening = Literal["kept", "started", "step", "finished", "waiting"]
_ASK_AGAIN_S = 0.5


@dataclass(frozen=True)
class Progress:
    """What just happened in a sweep, and what remains.

    `kept` is a trial that the store holds finished; `waiting`, one that another sweep is running, or keeps this
    machine or Slurm job busy with others: `holder` is that sweep's process.
    `remaining_s` is None until a trial's duration is known; `at_once` trials run side by side at most.
    """

    happening: Happening
    layout: Layout
    variant: str
    done: int
    total: int
    steps_done: int
    steps: int
    measurement: Measurement | None
    remaining_s: float | None
    at_once: int = 1
    holder: Owner | None = None


@dataclass(frozen=True)
class Prediction:
    """What the plan said about a layout before it was run; kept beside the measurement."""

    sec_per_it: float
    mem_gib: float


def kept_row(
    recipe: Recipe, cluster: Cluster, layout: Layout, store: Store, *, variant: Variant, retry: frozenset[Status]
) -> Measurement | None:
    """The stored row that a sweep keeps in place of running this trial; None where it runs it."""
    nowhere = Path()
    trial = prepare_trial(recipe, cluster, layout, data_dir=nowhere, work_dir=nowhere, variant=variant)
    row = store.trial(trial.key)
    return None if row is None or row.status in retry | NOT_OF_THE_LAYOUT else row


def overlong(trials: Sequence[tuple[Layout, float]], steps: int, timeout_s: float) -> str | None:
    """What to say before trials start of which some have no time for their steps; None where all have.

    `trials` are the layouts that are to run, with the seconds that a step of each is predicted to take.
    """
    longer = [(sec_per_it * steps, layout) for layout, sec_per_it in trials if sec_per_it * steps > timeout_s]
    if not longer:
        return None
    seconds, longest = max(longer, key=lambda one: one[0])
    return (
        f"sweep.timeout_s {timeout_s:g} s is shorter than the {steps} steps of {len(longer)} of {len(trials)} trials "
        f"are predicted to take, {seconds:,.0f} s of {longest}, start-up not counted: raise it or lower sweep.steps, "
        f"or these trials end as timeout"
    )


def run_sweep(
    recipe: Recipe,
    cluster: Cluster,
    layouts: Sequence[Layout],
    store: Store,
    *,
    data_dir: Path,
    work_dir: Path,
    launcher: Launcher | None = None,
    limits: Limits | None = None,
    predictions: Mapping[Layout, Prediction] | None = None,
    variants: Sequence[Variant] = (PLAIN,),
    retry: frozenset[Status] = frozenset(),
    on_progress: Callable[[Progress], None] = lambda progress: None,
    say: Callable[[str], None] = lambda text: None,
    worker: tuple[str, ...] = WORKER,
) -> list[Measurement]:
    """Measure every layout under every variant that the store does not hold yet; return all their rows.

    Rows come in the order of the layouts, and of a layout in that of the variants.

    A trial is claimed, run and stored, and its claim ends after that, so that after a kill -9 at any moment every trial
    is either stored or open. Trials whose stored status is in `retry`, or says nothing of the layout, are run once
    more. `say` gets a sentence of each trial that is run though its ranks may find no room. Raises TrimaranError for an
    invalid layout, and for a store that cannot be written though a trial is to be run, before anything runs.
    """
    asked = [(layout, variant) for layout in layouts for variant in variants]
    trials = [
        prepare_trial(recipe, cluster, layout, data_dir=data_dir, work_dir=work_dir, variant=variant)
        for layout, variant in asked
    ]
    predicted = {trial.key: (predictions or {}).get(layout) for trial, (layout, _) in zip(trials, asked, strict=True)}
    limits = limits or Limits(timeout_s=recipe.sweep.timeout_s, memory_gib=_memory_limit_gib(cluster))
    with launcher_of(recipe.sweep, cluster) if launcher is None else contextlib.nullcontext(launcher) as starts:
        starts.expect(max((nodes_of(layout, cluster.of_hosts) for layout in layouts), default=1))
        sweep = _Sweep(
            trials, store=store, launcher=starts, limits=limits, on_progress=on_progress, say=say, worker=worker
        )  # fmt: skip
        return sweep.run(predicted, retry)


def shared_by_sweeps(launcher: Launcher) -> str | None:
    """The name of what trials of several sweeps would run on at once; None where each has nodes of its own."""
    if launcher.on_this_machine:
        return f"machine-{this_boot()}"
    return None if launcher.job is None else f"slurm-job-{launcher.job}"


def _memory_limit_gib(cluster: Cluster) -> float | None:
    """What the ranks of one node may hold together, where the cluster says; GPUs limit themselves."""
    return cluster.host_mem_gib or None


def _not_stored_yet(trial: Trial, last: Measurement | None) -> Measurement | None:
    """The row of a run that found no room in the store; one that was stopped right behind its row has it there."""
    row = finished_before(trial)
    return None if row and last and row.step_times_s == last.step_times_s else row


class _Sweep:
    def __init__(
        self,
        trials: Sequence[Trial],
        *,
        store: Store,
        launcher: Launcher,
        limits: Limits,
        on_progress: Callable[[Progress], None],
        say: Callable[[str], None],
        worker: tuple[str, ...],
    ) -> None:
        self._trials = {trial.key: trial for trial in trials}  # a layout stated twice is one trial
        self._order = [trial.key for trial in trials]
        self._store, self._launcher, self._limits = store, launcher, limits
        self._on_progress, self._say, self._worker = on_progress, say, worker
        self._rows: dict[str, Measurement] = {}
        self._walls: list[float] = []
        self._claimed: set[str] = set()
        self._shared = shared_by_sweeps(launcher)
        self._crew = Crew(launcher.at_once)
        self._is_taken = False  # whether another sweep measures where trials would run

    def run(self, predicted: Mapping[str, Prediction | None], retry: frozenset[Status]) -> list[Measurement]:
        again = retry | NOT_OF_THE_LAYOUT
        wanted = {key: self._attempts_wanted(key, again) for key in self._trials}
        try:
            self._run_all(predicted, wanted)
        except BaseException:
            if self._claimed and self._launcher.at_once > 1:
                self._launcher.close()  # trials in other threads end with what they stand on
            raise
        finally:
            self._crew.close()
            for key in [*self._claimed, *filter(None, [self._shared])]:
                self._store.release(key)
        return [self._rows[key] for key in self._order]

    def _run_all(self, predicted: Mapping[str, Prediction | None], wanted: Mapping[str, int]) -> None:
        if any(self._store.attempts(key) < attempts for key, attempts in wanted.items()):
            self._store.require_writable()
        open_keys = list(self._trials)
        while open_keys or not self._crew.idle:
            left: list[str] = []
            self._is_taken = False
            for key in open_keys:
                if self._store.attempts(key) >= wanted[key]:
                    self._keep(self._trials[key])
                elif not (self._crew.full or self._is_taken) and self._claim(key, wanted[key]):
                    self._tell("started", self._trials[key])
                    last = self._store.trial(key)  # here, since a store is of the thread that opened it
                    self._crew.begin(key, partial(self._measured, self._trials[key], predicted[key], last))
                    left += self._store_finished()
                else:
                    left.append(key)
            if left == open_keys:
                if self._crew.idle:
                    self._tell("waiting", self._trials[left[0]], holder=self._holder(left[0]))
                    time.sleep(_ASK_AGAIN_S)
                else:
                    self._crew.wait(_ASK_AGAIN_S)
                    left += self._store_finished()
            open_keys = left

    def _claim(self, key: str, wanted: int) -> bool:
        """Claim a trial, and the machine or job that it would run in: two at once there would disturb each other."""
        if self._shared and not self._store.claim(self._shared):
            self._is_taken = True  # it is asked once for all trials: who waits must not keep the cores busy
            return False
        claimed = self._store.claim(key, attempts_seen=wanted - 1)
        if claimed:
            self._claimed.add(key)
        elif self._shared:
            self._store.release(self._shared)
        return claimed

    def _holder(self, key: str) -> Owner | None:
        """Who keeps a trial from being run: whoever measures where it would run, or whoever runs that trial."""
        there = self._store.holder(self._shared) if self._shared else None
        return there or self._store.holder(key)

    def _store_finished(self) -> list[str]:
        """Store what is finished; the keys of trials to run again.

        Of a trial whose claim was lost, as by a sweep that was stopped for minutes, another sweep has the folder now:
        its figures are no one's.
        """
        lost = []
        for key, row in self._crew.finished():
            self._claimed.discard(key)
            if self._store.holds(key):
                self._store.add(row)
                stored(self._trials[key])
                self._finish(self._trials[key], row, "finished")
            else:
                lost.append(key)
            if self._shared:
                self._store.release(self._shared)
        return lost

    def _attempts_wanted(self, key: str, retry: frozenset[Status]) -> int:
        stored = self._store.trial(key)
        return self._store.attempts(key) + 1 if stored is None or stored.status in retry else 1

    def _keep(self, trial: Trial) -> None:
        row = self._store.trial(trial.key)
        if row is None:
            raise TrimaranError(f"store {self._store.path}: trial {trial.key} vanished while the sweep ran")
        self._finish(trial, row, "kept")

    def _measured(self, trial: Trial, prediction: Prediction | None, last: Measurement | None) -> Measurement:
        """Run one trial, of which the store has `last`; its row."""
        row = (
            _not_stored_yet(trial, last)
            or self._without_room(trial)
            or run_trial(
                trial,
                self._launcher,
                replace(self._limits, step_s=prediction.sec_per_it if prediction else 0.0),
                on_step=lambda steps: self._tell("step", trial, steps_done=steps),
                worker=self._worker,
            )
        )
        dropped = drop_large_files(Path(trial.job.out_dir), self._limits.log_mib)
        if dropped and row.evidence:
            row = row.model_copy(update={"evidence": "\n".join((row.evidence, *dropped))})
        if prediction is None:
            return row
        return row.model_copy(
            update={"predicted_sec_per_it": prediction.sec_per_it, "predicted_mem_gib": prediction.mem_gib}
        )

    def _without_room(self, trial: Trial) -> Measurement | None:
        """The row of a trial whose ranks cannot find room, however far the prediction is off.

        None where they may: where they may not either, that is said.
        """
        recipe = trial.recipe
        case = Case.of(recipe.workload, trial.cluster, recipe.stack)
        lack = shortage(case, trial.layout, here=self._launcher.on_this_machine)
        if lack is None:
            return None
        if not lack.certain:
            self._say(lack.sentence)
            return None
        return not_started(trial, TrimaranError(lack.sentence), refused=True).row

    def _finish(self, trial: Trial, row: Measurement, happening: Happening) -> None:
        self._rows[trial.key] = row
        if row.wall_s is not None:
            self._walls.append(row.wall_s)
        self._tell(happening, trial, steps_done=len(row.step_times_s), row=row)

    def _tell(
        self,
        happening: Happening,
        trial: Trial,
        steps_done: int = 0,
        row: Measurement | None = None,
        holder: Owner | None = None,
    ) -> None:
        remaining, at_once = len(self._trials) - len(self._rows), self._launcher.at_once
        self._on_progress(
            Progress(
                happening=happening,
                layout=trial.layout,
                variant=trial.variant_text,
                done=len(self._rows),
                total=len(self._trials),
                steps_done=steps_done,
                steps=trial.job.steps,
                measurement=row,
                remaining_s=statistics.mean(self._walls) * -(-remaining // at_once) if self._walls else None,
                at_once=at_once,
                holder=holder,
            )
        )
