"""Play a pipeline schedule action by action: forward, backward and sends of every rank and micro-batch.

The schedules are those of trimaran.layout.schedule. Stages may differ from each other, and so may links.
trimaran.cost.pipeline.lockstep plays many pipelines at once, without saying who does what when.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.cost.pipeline.closed_form import pipeline_runs
from trimaran.cost.stage_work import stage_work
from trimaran.layout.layout import Layout
from trimaran.layout.schedule import Action, actions, feeds, rank_of
from trimaran.nouns.stack import FOLDED, Schedule
from trimaran.nouns.timeline import Event, EventKind, Timeline


@dataclass(frozen=True)
class SendTimes:
    """The link between a rank and the next, each way: seconds a send holds it, and until it arrives."""

    held_s: float
    arrives_s: float


@dataclass(frozen=True)
class PipelineRun:
    """What to simulate: seconds of each virtual stage, the schedule, and a link after each rank (to the first at last).

    `weight_s` is the part of a backward that may be put off; `blocks`: ranks wait while they send; `eager`: 1F1B goes
    ahead by twice as many forwards.
    """

    ranks: int
    micro_batches: int
    schedule: Schedule
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    links: tuple[SendTimes, ...]
    blocks: bool = False
    eager: bool = False


def simulate(run: PipelineRun) -> Timeline:
    """The timeline of one iteration's micro-batches: compute and sends of every rank."""
    return Timeline(events=tuple(_Player(run).play()), origin="simulated")


def pipeline_run(case: Case, layout: Layout) -> PipelineRun:
    """The run that an estimate of this layout speaks of, stage by stage."""
    grid = LayoutGrid.from_layouts([layout], case.workload, case.stack)
    times = stage_work(case, grid).times
    many = pipeline_runs(grid, replace(times, crowding=np.ones(1)))  # all stages at work, as they are when steady
    held, arrives = many.held_s[0].tolist(), many.arrives_s[0].tolist()

    def stages(by_rank: Floats) -> tuple[float, ...]:
        down, up = by_rank[0][:1], by_rank[0][1:]
        return tuple(np.concatenate([down, up[:, ::-1] if layout.schedule in FOLDED else up]).ravel().tolist())

    return PipelineRun(
        ranks=layout.pp,
        micro_batches=int(many.micro_batches[0]),
        schedule=layout.schedule,
        forward_s=stages(many.forward_s),
        backward_s=stages(many.backward_s),
        weight_s=stages(many.weight_s),
        links=tuple(SendTimes(*times) for times in zip(held, arrives, strict=True)),
        blocks=layout.schedule in many.blocks,
        eager=many.eager,
    )


class _Player:
    """Runs every rank's actions as soon as their inputs are there.

    `arrived` holds when the input of (going down, stage, micro-batch) is there.
    """

    def __init__(self, run: PipelineRun) -> None:
        self.run, self.events = run, list[Event]()
        micro_batches = run.micro_batches
        self.stages = len(run.forward_s)
        self.todo = [
            actions(run.schedule, r, run.ranks, self.stages, micro_batches, eager=run.eager) for r in range(run.ranks)
        ]
        of_input = tuple(b - w for b, w in zip(run.backward_s, run.weight_s, strict=True))
        self.duration = {
            "forward": run.forward_s,
            "backward": of_input if run.schedule == "zero_bubble" else run.backward_s,
            "backward_input": of_input,
            "backward_weight": run.weight_s,
        }
        self.arrived: dict[tuple[bool, int, int], float] = {(True, 0, m): 0.0 for m in range(micro_batches)}
        self.link_free: dict[tuple[bool, int], float] = {}
        self.free = [0.0] * run.ranks

    def play(self) -> list[Event]:
        """Everything that the ranks do."""
        position = [0] * self.run.ranks
        ready = deque(range(self.run.ranks))
        while ready:
            rank = ready.popleft()
            todo = self.todo[rank]
            while position[rank] < len(todo):
                receiver = self._act(rank, todo[position[rank]])
                if receiver is None:
                    break
                position[rank] += 1
                if receiver != rank:
                    ready.append(receiver)
        return self.events

    def _act(self, rank: int, action: Action) -> int | None:
        """Do the action, if its input is there; the rank that needs its output (or `rank`), else None."""
        kind, m, stage = action
        down = kind == "forward"
        start = self.free[rank]
        if kind != "backward_weight":
            arrived = self.arrived.get((down, stage, m))
            if arrived is None:
                return None
            start = max(start, arrived)
        end = self.free[rank] = start + self.duration[kind][stage]
        self._log(rank, kind, start, end, action)
        if kind == "backward_weight":
            return rank
        if down and stage == self.stages - 1:
            self.arrived[False, stage, m] = end
            return rank
        fed = feeds(action, self.stages)
        return rank if fed is None else self._send(rank, action, fed.stage, end)

    def _send(self, rank: int, action: Action, target: int, end: float) -> int:
        down, boundary = action.kind == "forward", min(action.stage, target) % self.run.ranks
        rising, receiver = down, rank_of(self.run.schedule, target, self.run.ranks)
        if self.run.schedule in FOLDED:
            if receiver == rank:
                self.arrived[down, target, action.micro_batch] = end
                return rank
            rising, boundary = receiver > rank, min(rank, receiver)
        link = self.run.links[boundary]
        begins = max(end, self.link_free.get((rising, boundary), 0.0))
        self.link_free[rising, boundary] = begins + link.held_s
        there = self.arrived[down, target, action.micro_batch] = begins + link.arrives_s
        if self.run.blocks:
            self.free[rank] = there
        if there > begins:
            self._log(rank, "send", begins, there, action)
        return receiver

    def _log(self, rank: int, kind: EventKind, start: float, end: float, action: Action) -> None:
        self.events.append(
            Event(rank=rank, kind=kind, start_s=start, end_s=end, micro_batch=action.micro_batch, stage=action.stage)
        )
