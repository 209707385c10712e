"""Play a pipeline schedule action by action: forward, backward and sends of every rank and micro-batch.

The schedules are those of trimaran.schedule. Stages may differ from each other, and so may the links between them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from trimaran.cluster import Cluster
from trimaran.cost.calibration import Calibration, resolve_calibration
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.stage_work import stage_work
from trimaran.layout import Layout, Schedule, resolve_split
from trimaran.schedule import Action, actions, feeds
from trimaran.stack import Stack
from trimaran.timeline import Event, EventKind, Timeline
from trimaran.workload import Workload


@dataclass(frozen=True)
class Link:
    """One boundary between consecutive virtual stages: seconds a send holds it, and until it arrives."""

    held_s: float
    arrives_s: float


@dataclass(frozen=True)
class PipelineRun:
    """What to simulate: seconds of each virtual stage, links between them, and the schedule.

    `weight_s` is the part of a backward that zero-bubble puts off; `blocks`: ranks wait while they send.
    """

    ranks: int
    micro_batches: int
    schedule: Schedule
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    links: tuple[Link, ...]
    blocks: bool = False


def simulate(run: PipelineRun) -> Timeline:
    """The timeline of one iteration's micro-batches: compute and sends of every rank."""
    events: list[Event] = []
    _Player(run, run.micro_batches, events).play()
    return Timeline(events=tuple(events), origin="simulated")


def simulated_time(run: PipelineRun) -> float:
    """Seconds from the first forward to the last backward.

    Once the pipeline is full every further round of micro-batches takes the same time, so a long iteration is
    played to its steady state and carried on from there.
    """
    ranks = run.ranks
    # Filling and draining take a round each, and one between them shows the steady pace; put-off weight
    # gradients and several chunks a rank take longer to settle.
    rounds = 3 if run.schedule in ("gpipe", "1f1b") else 5
    played = rounds * ranks + run.micro_batches % ranks
    if run.micro_batches <= played:
        return max(_Player(run, run.micro_batches, None).play())
    player = _Player(run, played, None)
    total = max(player.play())
    # Micro-batches leave the pipeline at its first stage.
    late, early = (rounds - 1) * ranks - 1, (rounds - 2) * ranks - 1
    pace = player.returned[late] - player.returned[early]
    if run.schedule == "gpipe":
        pace += player.reached[late] - player.reached[early]
    return total + pace * (run.micro_batches - played) / ranks


def pipeline_run(
    workload: Workload, cluster: Cluster, stack: Stack, layout: Layout, calibration: Calibration | None = None
) -> PipelineRun:
    """The run that an estimate of this layout speaks of, stage by stage."""
    known = resolve_calibration(cluster, stack, calibration)
    grid = LayoutGrid.from_layouts([layout], workload, stack)
    work = stage_work(workload, cluster, stack, grid, known)
    split = resolve_split(layout, workload, stack)
    last = len(split) - 1
    times = work.times
    forward, backward = [float(f[0]) for f in times.forward], [float(b[0]) for b in times.backward]
    layer_forward, layer_backward, layer_weight = (float(x[0]) for x in work.per_layer)
    ends_forward = (forward[0] - grid.layers_first[0] * layer_forward, forward[2] - grid.layers_last[0] * layer_forward)
    ends_backward = (
        backward[0] - grid.layers_first[0] * layer_backward,
        backward[2] - grid.layers_last[0] * layer_backward,
    )
    link = Link(float(times.send_held[0]), float(times.send_arrives[0]))
    return PipelineRun(
        ranks=layout.pp,
        micro_batches=int(grid.micro_batches[0]),
        schedule=layout.schedule,
        forward_s=tuple(
            n * layer_forward + (ends_forward[0] if i == 0 else 0) + (ends_forward[1] if i == last else 0)
            for i, n in enumerate(split)
        ),
        backward_s=tuple(
            n * layer_backward + (ends_backward[0] if i == 0 else 0) + (ends_backward[1] if i == last else 0)
            for i, n in enumerate(split)
        ),
        weight_s=tuple(n * layer_weight for n in split),
        links=(link,) * last,
        blocks=times.blocks,
    )


class _Player:
    """Runs every rank's actions as soon as their inputs are there.

    `arrived` holds when the input of (going down, stage, micro-batch) is there; `reached` when the last stage
    finished each forward, `returned` when the first finished each backward.
    """

    def __init__(self, run: PipelineRun, micro_batches: int, events: list[Event] | None) -> None:
        self.run, self.events = run, events
        self.stages = len(run.forward_s)
        self.todo = [actions(run.schedule, r, run.ranks, self.stages, micro_batches) for r in range(run.ranks)]
        backward = run.backward_s
        if run.schedule == "zero_bubble":
            backward = tuple(b - w for b, w in zip(backward, run.weight_s, strict=True))
        self.duration = {"forward": run.forward_s, "backward": backward, "backward_weight": run.weight_s}
        self.arrived: dict[tuple[bool, int, int], float] = {(True, 0, m): 0.0 for m in range(micro_batches)}
        self.link_free: dict[tuple[bool, int], float] = {}
        self.reached: list[float] = []
        self.returned: list[float] = []
        self.free = [0.0] * run.ranks

    def play(self) -> list[float]:
        """When each rank is done, seconds."""
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
        return self.free

    def _act(self, rank: int, action: Action) -> int | None:
        """Do the action, if its input is there; the rank that its output goes to (or the own), else None."""
        kind, m, stage = action
        down = kind == "forward"
        start = self.free[rank]
        if kind != "backward_weight":
            arrived = self.arrived.get((down, stage, m))
            if arrived is None:
                return None
            start = max(start, arrived)
        end = self.free[rank] = start + self.duration[kind][stage]
        if self.events is not None:
            self._log(rank, kind, start, end, action)
        if kind == "backward_weight":
            return rank
        if down and stage == self.stages - 1:
            self.arrived[False, stage, m] = end
            self.reached.append(end)
            return rank
        if stage == 0 and not down:
            self.returned.append(end)
        fed = feeds(action, self.stages)
        return rank if fed is None else self._send(rank, action, fed.stage, end)

    def _send(self, rank: int, action: Action, target: int, end: float) -> int:
        down, boundary = action.kind == "forward", min(action.stage, target)
        link = self.run.links[boundary]
        begins = max(end, self.link_free.get((down, boundary), 0.0))
        self.link_free[down, boundary] = begins + link.held_s
        there = self.arrived[down, target, action.micro_batch] = begins + link.arrives_s
        if self.run.blocks:
            self.free[rank] = there
        if self.events is not None and there > begins:
            self._log(rank, "send", begins, there, action)
        return target % self.run.ranks

    def _log(self, rank: int, kind: EventKind, start: float, end: float, action: Action) -> None:
        assert self.events is not None
        self.events.append(
            Event(rank=rank, kind=kind, start_s=start, end_s=end, micro_batch=action.micro_batch, stage=action.stage)
        )
