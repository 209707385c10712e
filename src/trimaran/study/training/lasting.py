"""A training that lasts: its ranks are started again after a fault, on the devices that are left, until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimaran.bench.trial.trial import Run, Trial, not_started, run_once
from trimaran.bench.watch.limits import Limits
from trimaran.bench.watch.verdict import is_consequence
from trimaran.layout.layout import Layout
from trimaran.layout.places import nodes_of
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.files import CHECKPOINT, RunFile
from trimaran.protocol.notices import Notice
from trimaran.study.training.devices import Devices
from trimaran.study.training.events import Event, EventKind, EventLog, now
from trimaran.study.training.folders import KeptStarts, own_log, set_aside
from trimaran.study.training.stopping import BEGIN_ANEW, GO_ON, StoppableLauncher, TrainingStoppedError
from trimaran.study.training.telling import Teller

# What ends starts before their first step may last for a moment, as of a file system: the waits after the first such
# start, the second, and all that follow.
WAITS_S = (0.0, 2.0, 10.0)
# How often a training on fewer nodes than it began on asks whether there are enough for its first layout again.
NODES_EVERY_S = 60.0
# Folders of starts that a fault ended, which are kept to be looked into.
KEPT_STARTS = 3
# Faults that say something of the recipe where no step was made at all.
_OF_THE_RECIPE = ("fail", "oom")


def wait_s(starts_in_vain: int) -> float:
    """Seconds to wait after so many starts in a row that ended before their first step."""
    return WAITS_S[min(starts_in_vain, len(WAITS_S)) - 1] if starts_in_vain else 0.0


@dataclass(frozen=True)
class Lasting:
    """How a training lasts.

    `restarts` is how often its ranks are started again in a row without a newer checkpoint. `trial_on` makes the
    trial of a layout, `layout_on` plans one for so many devices (None: the layout never changes); it raises
    TrimaranError where there is none. `joined`: whoever has started the ranks may start them again, by this process's
    exit status.
    """

    restarts: int
    trial_on: Callable[[Layout], Trial]
    layout_on: Callable[[int], Layout] | None = None
    joined: bool = False


class LastingTraining:
    """One training from its first start to its end."""

    def __init__(
        self,
        first: Trial,
        lasting: Lasting,
        launcher: StoppableLauncher,
        limits: Limits,
        events: EventLog,
        on_step: Callable[[dict[str, Any]], None],
        on_notice: Callable[[str], None],
    ) -> None:
        self._first, self._lasting, self._launcher, self._limits = first, lasting, launcher, limits
        self._events, self._on_step, self._on_notice = events, on_step, on_notice
        self._out_dir = Path(first.job.out_dir)
        self._trial = first
        self._devices = Devices(first.cluster.devices)
        self._kept = KeptStarts(KEPT_STARTS)
        self._teller = self._before = self._new_teller()  # of this start, and of the last that met a fault
        self._made_steps = False  # in any start
        self._growing = self._goes_on = False  # whether this start's ranks are to leave for more, and have made a step
        self._faults_in_a_row = self._starts_in_vain = 0
        self._waited_s = 0.0  # since the last step, until ranks could be started
        self._saved_at = self._last_step = 0
        self._last_step_at = time.monotonic()
        self._kept_at = 0  # what the next start is to begin at, should what nodes hold of it be whole
        self._failed_device: int | None = None
        self._restarted = False
        self._nodes: int | None = None
        self._nodes_asked_at = 0.0

    def to_the_end(self) -> Measurement:
        """Start the ranks, again after each fault, until all steps are made; the row of the training.

        Raises TrimaranError, naming the evidence, where it does not end well, and TrainingStoppedError where the
        ranks left as they were asked.
        """
        self._note(EventKind.BEGAN)
        while True:
            run = self._start()
            stopped_at = self._teller.stopped_at
            if run.row.status == "hang" and not self._launcher.stopping:
                # a rank that was given up and came to after all takes the signal that asks for its stacks as its leave
                stopped_at = None
            # what serves the ranks may ask them to leave too, as Slurm does before their time is over
            taken = None if self._launcher.stopping else run.loss
            grown = stopped_at is not None and self._growing and not self._launcher.stopping
            if grown:
                self._note(EventKind.GROWN, why=f"{self._usable()} devices are there")
            elif stopped_at is not None and not (taken and taken.again):
                why = taken.sentence if taken else None
                self._note(EventKind.STOPPED, why=why)
                saved = f"and saved; {GO_ON}" if self._saved_at == stopped_at else f"and could not save; {self.way_on}"
                raise TrainingStoppedError(f"{f'{why}; ' if why else ''}stopped at step {stopped_at} {saved}")
            elif run.row.status == "ok":
                self._note(EventKind.FINISHED)
                return run.row
            else:
                self._take_fault(run)
            self._make_ready(grown=grown)

    @property
    def way_on(self) -> str:
        """How a training that is stopped now is gone on with: from what was saved, or is held, by it or one before it.

        Ranks may have been ended between a checkpoint and its notice. What lies in the folder is this training's, or
        the one's that it resumes: any other's was set aside.
        """
        folder, held = self._first.job.checkpoint_dir, self._kept_at or self._teller.held_at
        saved = held or self._saved_at or (folder is not None and any(Path(folder).glob(CHECKPOINT)))
        return f"{GO_ON} from what was saved" if saved else BEGIN_ANEW

    def stopped_between_ranks(self) -> TrainingStoppedError:
        """Note that the training was told to leave while there were no ranks; the error that says so."""
        self._note(EventKind.STOPPED)
        return TrainingStoppedError(f"stopped before its ranks were started; {self.way_on}")

    def _start(self) -> Run:
        """One start of the ranks, to whatever end."""
        self._growing = self._goes_on = False
        self._teller = self._new_teller()
        devices = self._devices.usable()
        self._launcher.devices = None if len(devices) == self._first.cluster.devices else devices
        try:
            run = run_once(self._trial, self._launcher, self._limits, on_step=lambda step: self._look())
            self._look()
        except TrimaranError as error:
            if not self._restarted:
                raise
            run = not_started(self._trial, error)  # no room on the disk, or a queue that does not answer
        self._launcher.ended()
        self._starts_in_vain = 0 if self._goes_on else self._starts_in_vain + 1
        if not self._goes_on:
            self._waited_s += self._launcher.waited_s
        # ranks that ended before they resumed say nothing of what is saved
        if (saved_at := self._teller.saved_at) > self._saved_at:
            self._faults_in_a_row, self._failed_device = 0, None
        self._saved_at = saved_at or self._saved_at
        return run

    def _new_teller(self) -> Teller:
        return Teller(self._out_dir, self._on_step, self._on_notice, self._take_notice)

    def _look(self) -> None:
        """Pass on what is new, and see whether there are more devices than the ranks use."""
        self._teller.tell()
        if not self._teller.made_steps:
            return
        self._note_first_step()
        assert self._teller.last_step_at is not None, "a step was made"
        self._last_step, self._last_step_at = self._teller.last_step, self._teller.last_step_at
        if not self._growing and self._trial.job.saves and self._may_grow():
            self._growing = True
            self._launcher.ask_to_leave()

    def _note_first_step(self) -> None:
        """Note that the ranks of this start have made a step, where they have and it was not noted."""
        if self._goes_on or self._teller.first_step_at is None:
            return
        self._goes_on = self._made_steps = True
        # of the first start, since this object was made
        seconds = round(self._teller.first_step_at - self._last_step_at, 3)
        waited_s = round(self._waited_s + self._launcher.waited_s, 3)
        self._waited_s = 0.0
        if not self._restarted:
            self._note(EventKind.FIRST_STEP, seconds=seconds, waited_s=waited_s)
            return
        lost, lost_s = self._lost_besides()
        of_lost = (lost, lost_s) if lost else (None, None)
        self._note(EventKind.WENT_ON, seconds=seconds, waited_s=waited_s, lost_steps=of_lost[0], lost_s=of_lost[1])

    def _may_grow(self) -> bool:
        """Whether there are devices for the first layout, and ranks use fewer."""
        wanted, cluster = self._first.layout.devices, self._first.cluster.of_hosts
        if self._trial.layout.devices >= wanted or len(self._devices.usable()) < wanted:
            return False
        if wanted <= self._usable():
            return True
        now = time.monotonic()
        if now - self._nodes_asked_at < NODES_EVERY_S:
            return False
        self._nodes_asked_at = now
        nodes = nodes_of(self._first.layout, cluster)
        if self._launcher.has_nodes(nodes):
            self._nodes = nodes
        return wanted <= self._usable()

    def _take_fault(self, run: Run) -> None:
        """Note a fault. Raises where it ends the training."""
        row, layout, first = run.row, self._trial.layout, run.row.reason
        # whoever starts ranks stops all of them when one has failed, which is then the reason to give
        if self._launcher.stopping and is_consequence(first):
            self._note(EventKind.STOPPED)
            raise TrainingStoppedError(f"stopped before it could save; {self.way_on}")
        rank = run.verdict.rank
        lost, lost_s = self._lost()
        self._note(
            EventKind(row.status), rank=rank, node=run.node, lost_steps=lost, lost_s=lost_s,
            seconds=run.unnoticed_s or None, why=first,
        )  # fmt: skip
        self._faults_in_a_row += 1
        if (why := self._final(run)) is not None:
            raise TrimaranError(f"training on {layout} ended as {row.status}: {first}{why}; see {self._out_dir}")
        self._blame(rank)
        self._last_step = self._kept_at

    def _lost(self) -> tuple[int, float]:
        """What a fault costs, steps and seconds: those behind the newest state that is kept, should it be whole."""
        if self._teller.made_steps:
            self._kept_at, self._before = max(self._saved_at, self._teller.held_at), self._teller
            return max(0, self._last_step - self._kept_at), round(self._teller.lost_s(self._kept_at), 3)
        lost = self._lost_besides() if self._teller.began_at else (0, 0.0)
        self._kept_at = max(self._kept_at, self._saved_at)
        return lost

    def _lost_besides(self) -> tuple[int, float]:
        """What the fault before this start has cost beyond that, where what was kept is damaged or gone with a node."""
        began_at, kept_at = self._teller.began_at, self._kept_at
        if began_at >= kept_at:
            return 0, 0.0
        self._kept_at = began_at
        lost_s = self._before.lost_s(began_at) - self._before.lost_s(kept_at)
        return kept_at - began_at, round(lost_s, 3)

    def _final(self, run: Run) -> str | None:
        """What is to be said besides where a fault ends the training; None where another start may do.

        Raises TrainingStoppedError where the nodes were taken away and are not to be asked for again, where ranks that
        something else has started got further than a checkpoint (started again, they go on from there), and where
        the fault kept ranks from leaving as they were asked.
        """
        never_began = not (self._restarted or self._teller.made_steps) and run.row.status in _OF_THE_RECIPE
        no_start = run.loss is not None and not run.loss.again
        if no_start:
            raise TrainingStoppedError(f"{run.verdict.sentence}; {self.way_on}")
        if run.verdict.refused or never_began:
            return ""
        if self._lasting.joined and self._kept_at > self._teller.began_at:
            raise TrainingStoppedError(f"{run.verdict.sentence}; {GO_ON} from step {self._kept_at}")
        if not self._lasting.restarts:
            return ""
        if self._faults_in_a_row > self._lasting.restarts:
            return f", and {self._lasting.restarts} starts anew in a row brought no newer checkpoint"
        if self._launcher.stopping:
            self._note(EventKind.STOPPED)
            raise TrainingStoppedError(f"stopped before it could save, as {run.verdict.sentence}; {self.way_on}")
        return None

    def _blame(self, rank: int | None) -> None:
        """Leave out the device of a rank that has failed twice in a row, with no checkpoint in between.

        On other machines whoever starts ranks knows of nodes that died, and chooses others.
        """
        usable = self._devices.usable()
        on = self._trial.layout.placed or usable
        device = on[rank] if rank is not None and rank < len(on) else None
        twice = device is not None and device == self._failed_device
        may_leave_out = self._launcher.on_this_machine and self._lasting.layout_on is not None and len(usable) > 1
        if device is not None and twice and may_leave_out:
            self._devices.leave_out(device)
        self._failed_device = device

    def _make_ready(self, *, grown: bool) -> None:
        """Choose the next start's layout, and put what the last one left aside."""
        # ranks that left for more nodes are started on those that were found
        if not grown:
            self._nodes = self._launcher.nodes_left()
        self._nodes_asked_at = time.monotonic()
        layout = self._next_layout()
        kept = set_aside([self._out_dir])
        earlier = self._trial.job.earlier_logs
        if self._out_dir in kept:
            earlier = own_log(kept[self._out_dir]), *earlier
            self._kept.keep(kept[self._out_dir])
        if self._faults_in_a_row:
            where = f"from step {self._kept_at}" if self._kept_at else "from the first step"
            self._on_notice(
                f"starting anew {where} on {layout}, {self._faults_in_a_row} of {self._lasting.restarts} times "
                f"without a newer checkpoint"
            )
            waited_s = wait_s(self._starts_in_vain)
            time.sleep(waited_s)
            self._waited_s += waited_s
        # what nodes hold before the first step is of an earlier training, where this one is begun anew
        resume = self._first.job.resume or self._made_steps
        update: dict[str, Any] = {"resume": resume, "out_dir": str(self._out_dir)}
        update |= {name: getattr(self._first.job, name) for name in ("checkpoint_dir", "track")}
        update["earlier_logs"] = earlier
        # a start that ended before it had profiled its steps leaves that to the next
        traced = any(kept.get(self._out_dir, self._out_dir).glob(RunFile.TRACE.format("*")))
        update["trace_steps"] = 0 if traced else self._trial.job.trace_steps
        trial = self._lasting.trial_on(layout)
        self._trial = replace(trial, recipe=self._first.recipe, job=trial.job.model_copy(update=update))
        self._restarted = True

    def _usable(self) -> int:
        """How many devices ranks may use, on the nodes that there were when the ranks were last started."""
        usable = len(self._devices.usable())
        per_node = self._first.cluster.of_hosts.devices_per_node
        return usable if self._nodes is None else min(usable, self._nodes * per_node)

    def _next_layout(self) -> Layout:
        """The first layout where there are devices for it, else the best one for those that are left."""
        usable = self._usable()
        if usable >= self._first.layout.devices or self._lasting.layout_on is None:
            left_out = {*self._first.layout.placed} - {*self._devices.usable()}
            return self._first.layout.model_copy(update={"placed": ()}) if left_out else self._first.layout
        if usable >= self._trial.layout.devices:
            return self._trial.layout
        try:
            return self._lasting.layout_on(usable)
        except TrimaranError as error:
            self._on_notice(f"no layout on {usable} devices, so all are used again: {error}")
            return self._first.layout

    def _take_notice(self, notice: dict[str, Any]) -> None:
        """Note what the ranks told of: a checkpoint or none, a slow rank, a bad step."""
        self._note_first_step()
        step, why = notice["step"], notice.get("why")
        if notice["kind"] == Notice.SAVED:
            self._note(EventKind.SAVED, step=step, seconds=round(notice["blocked_s"], 3))
        elif notice["kind"] == Notice.NOT_SAVED:
            self._note(EventKind.NOT_SAVED, step=step, why=notice["text"])
        elif notice["kind"] == Notice.SLOW:
            node = self._launcher.node_of(notice["rank"])
            self._on_notice(f"step {step}: rank {notice['rank']} on node {node or 'unknown'} is slow, {why}")
            self._note(EventKind.SLOW, step=step, rank=notice["rank"], node=node, why=why)
        else:
            back_to, lost_s = notice["back_to"], notice.get("lost_s")
            lost = None if back_to is None else step - back_to
            self._on_notice(f"step {step}: {why}; {notice['done']}")
            self._note(EventKind.BAD_LOSS, step=step, lost_steps=lost, lost_s=lost_s, why=f"{why}; {notice['done']}")

    def _note(self, kind: EventKind, *, step: int | None = None, **cells: str | float | None) -> None:
        """Write a row; `cells` are further columns of it."""
        stated = {
            "at": now(),
            "event": kind,
            "step": step or self._teller.last_step or self._last_step,
            "saved_step": max(self._saved_at, self._teller.saved_at),
            "layout": str(self._trial.layout),
        }
        self._events.add(Event.model_validate(stated | cells))
