"""Play many folded pipelines (ZB-V, DualPipeV) at once, action by action of the lists in trimaran.layout.schedule.

Which action waits for which is the same for all pipelines of a schedule with as many ranks and micro-batches: the one
before it on its rank and the one that makes its input. Actions that wait for none of each other are played together,
over all the pipelines. Once every action of a stage comes later by the same time with each further micro-batch, the
steady state goes on as it is, so that long pipelines are played with fewer micro-batches.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from trimaran.cost.grid import Bools, Floats, Ints
from trimaran.cost.pipeline.runs import PipelineRuns
from trimaran.layout.schedule import Action, actions, feeds, rank_of
from trimaran.nouns.stack import Schedule

KINDS = ("forward", "backward", "backward_input", "backward_weight")
# Micro-batches, in ranks, that are played at first of pipelines that have more, and how many settle every pace.
_AT_FIRST, _LONGEST = 6, 4096
# Times that differ by no more than this share of them are the same.
_SAME = 1e-9
# Pipelines that are played together, so that their times stay in the processor's cache.
_TOGETHER = 160


@dataclass(frozen=True)
class Order:
    """The actions of all ranks, each behind those that it waits for: arrays over actions, their number for none.

    `before` is the rank's action before, `fed` the one that makes the input, `queued` the one that sends over the same
    link before. `work` is kind * stages + stage. `link` is the boundary that the output crosses: those down the ranks,
    those up, and 2 ranks for none. `came` is that of the input. `levels` are slices of actions that wait for none of
    each other; `at` has the action of (forward, backward or weight gradients; stage; micro-batch), -1 for none.
    """

    before: Ints
    fed: Ints
    queued: Ints
    work: Ints
    link: Ints
    came: Ints
    levels: tuple[slice, ...]
    at: Ints


@lru_cache(maxsize=64)
def order_of(schedule: Schedule, ranks: int, micro_batches: int) -> Order:
    """An order in which the actions of a folded schedule can be played."""
    stages = 2 * ranks
    todo = [actions(schedule, rank, ranks, stages, micro_batches) for rank in range(ranks)]
    level, before = dict[Action, int](), dict[Action, Action | None]()
    fed_by = dict[Action, Action]()
    made = dict[tuple[bool, int, int], Action]()
    position, ready = [0] * ranks, deque(range(ranks))
    while ready:
        rank = ready.popleft()
        while position[rank] < len(todo[rank]):
            action = todo[rank][position[rank]]
            kind, micro_batch, stage = action
            down = kind == "forward"
            needed = (
                None if kind == "backward_weight" or (down and stage == 0) else made.get((down, stage, micro_batch))
            )
            if needed is None and not (kind == "backward_weight" or (down and stage == 0)):
                break
            last = todo[rank][position[rank] - 1] if position[rank] else None
            before[action] = last
            if needed is not None:
                fed_by[action] = needed
            level[action] = 1 + max(level[one] if one else -1 for one in (last, needed))
            position[rank] += 1
            fed = feeds(action, stages)
            if down and stage == stages - 1:
                made[False, stage, micro_batch] = action
            elif fed is not None:
                made[down, fed.stage, micro_batch] = action
                ready.append(rank_of(schedule, fed.stage, ranks))
    in_order = sorted(level, key=level.__getitem__)
    index: dict[Action | None, int] = {action: place for place, action in enumerate(in_order)}
    index[None] = len(in_order)
    link = {action: _link(schedule, action, ranks) for action in in_order}
    sent_before = dict[Action, Action]()
    for rank in range(ranks):
        latest = dict[int, Action]()
        for action in todo[rank]:
            if link[action] in latest:
                sent_before[action] = latest[link[action]]
            latest[link[action]] = action
    bounds = np.flatnonzero(np.diff([level[action] for action in in_order], prepend=-1, append=len(in_order) + 1))
    at = np.full((3, stages, micro_batches), -1, dtype=np.int64)
    for action in in_order:
        row = {"forward": 0, "backward_weight": 2}.get(action.kind, 1)
        at[row, action.stage, action.micro_batch] = index[action]
    none = 2 * ranks
    return Order(
        before=np.array([index[before[action]] for action in in_order]),
        fed=np.array([index[fed_by.get(action)] for action in in_order]),
        queued=np.array([index[sent_before.get(action) if link[action] < none else None] for action in in_order]),
        work=np.array([KINDS.index(action.kind) * stages + action.stage for action in in_order]),
        link=np.array([link[action] for action in in_order]),
        came=np.array([link[fed_by[action]] if action in fed_by else none for action in in_order]),
        levels=tuple(slice(start, end) for start, end in pairwise(bounds.tolist())),
        at=at,
    )


def _link(schedule: Schedule, action: Action, ranks: int) -> int:
    """The rank before the boundary that an action's output crosses, `ranks` more on the way up; 2 ranks for none."""
    fed = feeds(action, 2 * ranks)
    here, there = (rank_of(schedule, one.stage, ranks) if one else None for one in (action, fed))
    if there is None or here is None or here == there:
        return 2 * ranks
    return here if there > here else ranks + there


def play_order(order: Order, work_s: Floats, held_s: Floats, arrives_s: Floats) -> Floats:
    """When each action ends, with a last row for none: columns of pipelines, as of all arrays.

    `work_s` are the seconds of each kind and stage, `held_s` and `arrives_s` those of each link and of none.
    """
    count, pipelines = len(order.work), work_s.shape[1]
    ends, leaves = np.zeros((count + 1, pipelines)), np.zeros((count + 1, pipelines))
    leaves[count] = -np.inf
    queues = bool(held_s.any())
    for at in order.levels:
        begins = np.maximum(ends[order.before[at]], leaves[order.fed[at]] + arrives_s[order.came[at]])
        begins += work_s[order.work[at]]
        ends[at] = begins
        if queues:
            link = order.link[at]
            begins = np.maximum(begins, leaves[order.queued[at]] + held_s[link])
        leaves[at] = begins
    return ends


def play_folded(schedule: Schedule, runs: PipelineRuns) -> Floats:
    """Seconds from the first forward to the last backward of each run of a folded schedule, shape (n,)."""
    total = np.zeros(len(runs.ranks))
    for ranks in np.unique(runs.ranks).tolist():
        members = np.flatnonzero(runs.ranks == ranks)
        for start in range(0, len(members), _TOGETHER):
            some = members[start : start + _TOGETHER]
            total[some] = _play_alike(schedule, ranks, runs.take(some))
    return total


def _play_alike(schedule: Schedule, ranks: int, runs: PipelineRuns) -> Floats:
    """The same of runs on as many ranks."""
    micro_batches, times = runs.micro_batches, _times(schedule, ranks, runs)
    total = np.zeros(len(micro_batches))
    left, played = np.arange(len(micro_batches)), _AT_FIRST * ranks
    while len(left):
        whole = micro_batches[left] <= played
        for count in np.unique(micro_batches[left[whole]]).tolist():
            rows = left[micro_batches[left] == count]
            total[rows] = play_order(order_of(schedule, ranks, count), *(each[:, rows] for each in times)).max(axis=0)
        left = left[~whole]
        if len(left):
            order = order_of(schedule, ranks, played)
            ends = play_order(order, *(each[:, left] for each in times))
            pace, steady = _pace(order, ends, ranks, played)
            steady |= played >= _LONGEST
            rows = left[steady]
            total[rows] = ends.max(axis=0)[steady] + (micro_batches[rows] - played) * pace[steady]
            left, played = left[~steady], 2 * played
    return total


def _times(schedule: Schedule, ranks: int, runs: PipelineRuns) -> tuple[Floats, Floats, Floats]:
    """Seconds of the kinds of work on each stage, and what a send holds and until it arrives: columns of runs."""

    def by_stage(by_rank: Floats) -> Floats:
        return np.concatenate([by_rank[:, 0], by_rank[:, 1, ::-1]], axis=1).T

    forward, backward, weight = map(by_stage, (runs.forward_s, runs.backward_s, runs.weight_s))
    none = np.zeros((1, len(runs.ranks)))
    arrives, held = (np.concatenate([each.T, each.T, none]) for each in (runs.arrives_s, runs.held_s))
    if schedule in runs.blocks:
        # A rank that waits for its sends is busy with them, and nothing is left for the link.
        down = [_link(schedule, Action("forward", 0, stage), ranks) for stage in range(2 * ranks)]
        up = [_link(schedule, Action("backward", 0, stage), ranks) for stage in range(2 * ranks)]
        forward, backward = forward + arrives[down], backward + arrives[up]
        arrives, held = np.zeros(arrives.shape), np.zeros(held.shape)
    return np.concatenate([forward, backward, backward - weight, weight]), held, arrives


def _pace(order: Order, ends: Floats, ranks: int, micro_batches: int) -> tuple[Floats, Bools]:
    """Seconds by which a micro-batch comes after the one before, and where it is the same for all in the middle.

    The middle leaves out 2 ranks micro-batches at either end, which fill and drain; the time of no action there depends
    on one more than 2 ranks micro-batches ago.
    """
    middle = order.at[:, :, 2 * ranks : micro_batches - 2 * ranks]
    times = np.stack([ends[kind] for kind in middle if (kind >= 0).all()])
    later = np.diff(times, axis=2)
    most, least = later.max(axis=(0, 1, 2)), later.min(axis=(0, 1, 2))
    mean = (times[:, :, -1] - times[:, :, 0]).max(axis=(0, 1)) / max(later.shape[2], 1)
    return mean, most - least <= _SAME * most
