"""Play many folded pipelines (ZB-V, DualPipeV) at once, action by action of the lists in trimaran.layout.schedule.

Which action waits for which is the same for all pipelines of a schedule with as many ranks and micro-batches: the one
before it on its rank and the one that makes its input. Actions that wait for none of each other are played together,
over all the pipelines. Once every action of a stage comes later by the same time with each further micro-batch, the
steady state goes on as it is, so that long pipelines are played with fewer micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from trimaran.cost.grid import Bools, Floats, Ints
from trimaran.cost.pipeline.runs import PipelineRuns
from trimaran.layout.schedule import Action, actions, feeds, rank_of
from trimaran.nouns.stack import Schedule
from trimaran.nouns.timeline import EventKind

KINDS: tuple[EventKind, ...] = ("forward", "backward", "backward_input", "backward_weight")
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
    stages, none = 2 * ranks, 2 * ranks
    by_rank = [actions(schedule, rank, ranks, stages, micro_batches) for rank in range(ranks)]
    bounds = np.cumsum([0, *map(len, by_rank)]).tolist()
    todo = [action for rank in by_rank for action in rank]
    count = len(todo)
    kind = np.array([KINDS.index(action.kind) for action in todo])
    stage, micro_batch = (np.array([action[field] for action in todo]) for field in (2, 1))
    down, weight = kind == KINDS.index("forward"), kind == KINDS.index("backward_weight")

    # what goes from one action to another is known by its way, down or up, the stage that needs it, and micro-batch
    def piece(down: Bools, stage: Ints, of: Bools) -> Ints:
        known = (down * stages + stage) * micro_batches + micro_batch
        return np.asarray(np.where(of, known, 2 * stages * micro_batches))

    turns = down & (stage == stages - 1)
    makes = piece(down & ~turns, stage + np.where(turns, 0, np.where(down, 1, -1)), ~weight & (down | (stage > 0)))
    maker = np.full(2 * stages * micro_batches + 1, count)
    maker[makes] = np.arange(count)
    maker[-1] = count
    fed = maker[piece(down, stage, ~weight & ~(down & (stage == 0)))]
    before = np.arange(-1, count - 1)
    before[[start for start, end in pairwise(bounds) if start < end]] = count
    level = np.array(_levels(bounds, fed.tolist()))
    in_order = np.argsort(level, kind="stable")
    index = np.full(count + 1, count)
    index[in_order] = np.arange(count)
    links = [[_link(schedule, Action(name, 0, each), ranks) for each in range(stages)] for name in KINDS]
    link = np.array(links)[kind, stage]
    queued = np.full(count, count)
    for start, end in pairwise(bounds):
        for each in np.unique(link[start:end]).tolist():
            sends = start + np.flatnonzero(link[start:end] == each)
            queued[sends[1:]] = sends[:-1] if each < none else count
    at = np.full((3, stages, micro_batches), -1, dtype=np.int64)
    at[np.where(down, 0, np.where(weight, 2, 1)), stage, micro_batch] = index[:count]
    starts = np.flatnonzero(np.diff(level[in_order], prepend=-1, append=count + 1))
    return Order(
        before=index[before][in_order],
        fed=index[fed][in_order],
        queued=index[queued][in_order],
        work=(kind * stages + stage)[in_order],
        link=link[in_order],
        came=np.append(link, none)[fed][in_order],
        levels=tuple(slice(start, end) for start, end in pairwise(starts.tolist())),
        at=at,
    )


def _levels(bounds: Sequence[int], fed: Sequence[int]) -> list[int]:
    """How many actions come before each at least: one more than before the last on its rank, and what it is fed by.

    Each rank goes on until an input is not made yet, and again when it is.
    """
    count = len(fed)
    level, last = [-1] * (count + 1), [-1] * len(bounds)
    position, is_made, waits_for = list(bounds[:-1]), [False] * count + [True], dict[int, int]()
    ready = list(range(len(position)))
    while ready:
        rank = ready.pop()
        at, here = position[rank], last[rank]
        while at < bounds[rank + 1]:
            if not is_made[fed[at]]:
                waits_for[fed[at]] = rank
                break
            here = 1 + max(here, level[fed[at]])
            level[at], is_made[at] = here, True
            if at in waits_for:
                ready.append(waits_for.pop(at))
            at += 1
        position[rank], last[rank] = at, here
    return level[:count]


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

    The middle leaves out 2 ranks micro-batches at either end, which fill and drain, and the first half where more than
    at first are played, since deep pipelines fill for longer; the time of no action there depends on one more than
    2 ranks micro-batches ago.
    """
    fills = 2 * ranks if micro_batches <= _AT_FIRST * ranks else micro_batches // 2
    middle = order.at[:, :, fills : micro_batches - 2 * ranks]
    times = np.stack([ends[kind] for kind in middle if (kind >= 0).all()])
    later = np.diff(times, axis=2)
    most, least = later.max(axis=(0, 1, 2)), later.min(axis=(0, 1, 2))
    mean = (times[:, :, -1] - times[:, :, 0]).max(axis=(0, 1)) / max(later.shape[2], 1)
    return mean, most - least <= _SAME * most
