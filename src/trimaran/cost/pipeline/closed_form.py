"""Closed form of a pipeline's iteration: fill and drain, the rank that paces it, and sends that are not hidden.

The time of a schedule is the longest path through its events. Such a path runs down to one rank, the pivot, stays
with it for all micro-batches, and runs up again; where that is longer it leaves the pivot for round trips to the
last stage and back, first, last and in between. Ranks at the ends of runs of equal ranks are the pivots to try.
trimaran.cost.pipeline.lockstep plays the schedules themselves; benchmarks/planner.py shows how far the two are apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from trimaran.cost.grid import Floats, Ints, LayoutGrid
from trimaran.cost.pipeline.folded_form import folded_time
from trimaran.cost.pipeline.paced_paths import PacedPaths
from trimaran.cost.pipeline.pipelines import AlikePipelines, Pipelines
from trimaran.cost.pipeline.runs import OF_STACK, PipelineRuns
from trimaran.cost.pipeline.stage_times import StageTimes
from trimaran.cost.splits.split_table import SplitTable
from trimaran.nouns.stack import FOLDED, Schedule

# An odd number with bits all over, by which a hash is multiplied (of splitmix64, Steele et al., OOPSLA 2014).
_MIX = np.uint64(0xBF58476D1CE4E5B9)
# Pipelines whose paths are looked at together: some twenty arrays over them stay in the nearest cache.
_BLOCK = 8192


@dataclass(frozen=True)
class PipelineTime:
    """Seconds of all micro-batches: `busy` of the slowest rank, waiting for sends, and the bubble."""

    total: Floats
    busy: Floats
    sends: Floats
    bubble: Floats


def slowest_rank(grid: LayoutGrid, times: StageTimes) -> tuple[Ints, Floats]:
    """Which rank has most to do, the first (0), one between (1) or the last (2; a lone one), and its layers."""
    layers = _rank_layers(grid)
    work = _rank_work(grid, times, layers)
    slowest = np.argmax(work, axis=0)
    return slowest, np.choose(slowest, layers)


def _rank_layers(grid: LayoutGrid) -> tuple[Floats, Floats, Floats]:
    a, b, c = (ranks[grid.split_row] * 1.0 for ranks in (grid.splits.first, grid.splits.middle, grid.splits.last))
    return a, b, c


def _rank_work(grid: LayoutGrid, times: StageTimes, layers: tuple[Floats, Floats, Floats]) -> Floats:
    """Seconds per micro-batch of the first rank, the fullest one between and the last, shape (3, n)."""
    layer = times.forward + times.backward
    first, last = times.first_forward + times.first_backward, times.last_forward + times.last_backward
    single = grid.pp == 1
    turned = np.where(grid.folded, last, 0.0)  # the first rank has both ends
    return np.stack(
        [
            np.where(single, -1.0, layers[0] * layer + first + turned),
            np.where(grid.pp > 2, layers[1] * layer, -1.0),
            layers[2] * layer + (last - turned) + np.where(single, first, 0.0),
        ]
    )


def pipeline_time(grid: LayoutGrid, times: StageTimes, *, apart: bool = True) -> PipelineTime:
    """Time from the first forward to the last backward, for every layout of the grid.

    Where stages share cores it is the larger of two bounds: the cores never rest (`busy`), or the stages wait for
    each other and for the network, and whoever works then has the cores to itself. Unless `apart`, all waiting is
    told as sends, which is quicker.
    """
    busy = grid.micro_batches * _rank_work(grid, times, _rank_layers(grid)).max(axis=0)
    alone = times.alone()
    first, inverse = _distinct_pipelines(grid, alone)
    if apart:
        # Both at once: a few thousand pipelines cost little more than a few hundred.
        both = np.concatenate([first, first])
        once = _longest(Pipelines.of(grid).take(both), alone.take(both).silent_from(len(first)))
        total, silent = once[: len(first)], once[len(first) :]
    else:
        total, silent = _longest(Pipelines.of(grid).take(first), alone.take(first)), np.zeros(len(first))
    waited, computed = np.maximum(total[inverse], busy), np.maximum(silent[inverse], busy)
    computed = np.minimum(computed, waited)
    return PipelineTime(total=waited, busy=busy, sends=waited - computed, bubble=computed - busy)


def _distinct_pipelines(grid: LayoutGrid, times: StageTimes) -> tuple[Ints, Ints]:
    """Index of one layout of each distinct pipeline, and each layout's pipeline.

    Layouts that differ in ZeRO, in how replicas agree or, often, in placement run the same one. They are told apart by
    a hash, which is checked: should two pipelines share one, all are taken to be distinct.
    """
    keys = [grid.schedule, grid.pp, grid.vpp, grid.split_row, grid.micro_batches]
    keys += [getattr(times, f.name).view(np.int64) for f in fields(times) if f.name not in OF_STACK]
    code = np.zeros(len(grid), dtype=np.uint64)
    for key in keys:
        code = (code ^ key.view(np.uint64)) * _MIX
        code ^= code >> np.uint64(29)
    first, inverse = _distinct_codes(code)
    if all(np.array_equal(key[first][inverse], key) for key in keys):
        return first, inverse
    return np.arange(len(grid)), np.arange(len(grid))


def _distinct_codes(code: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """Index of one row of each distinct code, and each row's code: np.unique's stable sort takes five times as long."""
    order = np.argsort(code)
    ordered = code[order]
    begins = np.ones(len(code), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
    inverse = np.empty(len(code), dtype=np.int64)
    inverse[order] = np.cumsum(begins) - 1
    return order[begins], inverse


def silent_time(grid: LayoutGrid, times: StageTimes) -> Floats:
    """The same without sends: the busy time of the slowest rank and the bubble."""
    busy = grid.micro_batches * _rank_work(grid, times, _rank_layers(grid)).max(axis=0)
    return np.asarray(np.maximum(_longest(Pipelines.of(grid), times.alone().silent_from(0)), busy))


def _longest(pipelines: Pipelines, times: StageTimes) -> Floats:
    """The longest path through the events of each pipeline, seconds; 0 where there is one stage."""
    longest = np.zeros(len(pipelines.ranks))
    many = pipelines.ranks > 1
    for schedule in FOLDED:
        rows = np.flatnonzero(pipelines.runs(schedule) & many)
        if len(rows):
            longest[rows] = folded_time(schedule, pipelines.take(rows), times.take(rows))
    for schedule, formula in _FORMULAS.items():
        members = np.flatnonzero(pipelines.runs(schedule) & many)
        if not len(members):
            continue
        pivots = _pivot_counts(pipelines.splits, formula)[pipelines.split_row[members]]
        for count in np.flatnonzero(np.bincount(pivots)).tolist():
            for rows in _blocks(members[pivots == count]):
                longest[rows] = formula(AlikePipelines(schedule, pipelines.take(rows), times.take(rows), count))
    return longest


def _blocks(rows: Ints) -> Iterator[Ints]:
    return (rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK))


def _pivot_counts(splits: SplitTable, formula: Callable[[AlikePipelines], Floats]) -> Ints:
    if formula is _gpipe:
        return np.zeros(len(splits.splits), dtype=np.int64)
    return splits.warm_up_counts if formula is _interleaved else splits.pivot_counts


def pipeline_runs(grid: LayoutGrid, times: StageTimes) -> PipelineRuns:
    """The grid's pipelines for trimaran.cost.pipeline.lockstep, virtual stage by virtual stage."""
    layers, times = grid.splits.layers(grid.split_row).astype(np.float64), times.alone()

    def stages(layer: Floats, first: Floats | float, last: Floats | float) -> Floats:
        of = layers * layer[:, None, None]
        of[:, 0, 0] += first
        of[np.arange(len(grid)), grid.vpp - 1, np.where(grid.folded, 0, grid.pp - 1)] += last
        return of

    links = np.ones(layers.shape[2])
    return PipelineRuns(
        schedule=grid.schedule,
        ranks=grid.pp,
        chunks=grid.vpp,
        micro_batches=grid.micro_batches,
        forward_s=stages(times.forward, times.first_forward, times.last_forward),
        backward_s=stages(times.backward, times.first_backward, times.last_backward),
        weight_s=stages(times.weight, 0.0, 0.0),
        held_s=np.multiply.outer(times.send_held, links),
        arrives_s=np.multiply.outer(times.send_arrives, links),
        blocks=times.blocks,
        eager=times.eager,
    )


def _gpipe(pipe: AlikePipelines) -> Floats:
    """All forwards, then all backwards: each sweep is paced by its slowest part, a rank or a link. Exact.

    Stages that share cores are all at work in between, and one after the other as a sweep begins and ends.
    """
    t = pipe.times
    forward, backward = _slowest(pipe)
    held = 0.0 if pipe.blocks else t.send_held
    pace = np.maximum(forward * t.crowding, held) + np.maximum(backward * t.crowding, held)
    return np.asarray(_once(pipe) + (pipe.m - 1.0) * pace)


def _slowest(pipe: AlikePipelines) -> tuple[Floats, Floats]:
    """Seconds of the slowest rank's forward of one micro-batch, and of the slowest one's backward."""
    t, splits, split_row = pipe.times, pipe.splits, pipe.split_row
    waits = t.send_arrives if pipe.blocks else 0.0
    layers = [ranks[split_row] for ranks in (splits.first, splits.middle, splits.last)]
    forward = np.maximum(layers[0] * t.forward + t.first_forward + waits, layers[2] * t.forward + t.last_forward)
    backward = np.maximum(layers[0] * t.backward + t.first_backward, layers[2] * t.backward + t.last_backward + waits)
    between = pipe.p > 2
    forward = np.where(between, np.maximum(forward, layers[1] * t.forward + waits), forward)
    backward = np.where(between, np.maximum(backward, layers[1] * t.backward + waits), backward)
    return forward, backward


def _once(pipe: AlikePipelines) -> Floats:
    """One micro-batch through all stages and back."""
    t = pipe.times
    ends = t.first_forward + t.first_backward + t.last_forward + t.last_backward
    sends = 2.0 * (pipe.p * pipe.pipelines.chunks - 1.0) * t.send_arrives
    return pipe.splits.totals[pipe.split_row] * (t.forward + t.backward) + ends + sends


def _paced(pipe: AlikePipelines) -> Floats:
    """1F1B, and zero-bubble ZB-H1 (Qi et al., arXiv 2401.10241): the longest of the paths by each pivot.

    Stages that share cores are all at work in 1F1B's middle, and one after the other as it begins and ends.
    """
    paths = PacedPaths(pipe)
    longest = np.maximum.reduce([paths.by(pivot) for pivot in range(pipe.pivots)])
    crowded = pipe.times.crowding > 1.0
    if pipe.schedule != "1f1b" or not crowded.any():
        return np.asarray(longest)
    forward, backward = _slowest(pipe)
    middle = (pipe.m - 1.0) * (forward + backward) * pipe.times.crowding
    return np.where(crowded, np.maximum(longest, _once(pipe) + middle), longest)


def _interleaved(pipe: AlikePipelines) -> Floats:
    """1F1B whose fill and drain shrink by v (Narayanan et al., arXiv 2104.04473, section 2.2).

    The pivot q runs w forwards until its first backward, and w backwards from its last forward on. The longest ways
    through that warm-up and that cool-down (trimaran.cost.splits.warm_up) are of so many layers, sends and visits to
    the first stage; between them q does what is left of its work:

        time = max over q of  way(F) + m (F + B) layers(q) - w-turns(F) - w-turns(B) + way(B)

    and where that is longer, the way to q or from it leads by the last rank, which works for some chunks meanwhile.
    Micro-batches come in groups of p: those that the last group lacks are left out at the slowest rank's pace.
    """
    t, p, v = pipe.times, pipe.p, pipe.pipelines.chunks * 1.0
    m = np.ceil(pipe.m / p) * p
    split_row = pipe.split_row
    lag = np.zeros(len(p)) if pipe.blocks else t.send_arrives
    wait = t.send_arrives if pipe.blocks else np.zeros(len(p))
    layer = t.forward + t.backward
    best, slowest = np.full(len(p), -np.inf), np.zeros(len(p))
    table = pipe.splits.warm_ups
    fill_last = drain_last = best
    # From the last rank, to which the others may go by a detour.
    for j in reversed(range(pipe.pivots)):
        q, n, turns, warm, firsts, lasts = (column[split_row, j] for column in table[:6])
        layers, sends, visits, start, end = (column[split_row, j] for column in table[6:])
        first, last = (q == 0) * 1.0, (q == p - 1) * 1.0
        # Every chunk is sent on and its gradient back, but for the last one's output and the first one's input.
        down = n * t.forward + first * t.first_forward + last * t.last_forward + (v - last) * wait
        up = n * t.backward + first * t.first_backward + last * t.last_backward + (v - first) * wait
        warm_down = warm * t.forward + firsts * t.first_forward + lasts * t.last_forward + (turns - lasts) * wait
        warm_back = warm * t.backward + firsts * t.first_backward + lasts * t.last_backward + (turns - firsts) * wait
        hops = sends * lag[:, None]
        ahead = layers * t.forward[:, None] + visits * t.first_forward[:, None] + hops
        back = layers * t.backward[:, None] + visits * (t.first_backward - wait)[:, None] + hops
        fill = ahead.max(axis=1) + last * (t.last_forward - wait) + (q + turns) * wait
        drain = back.max(axis=1) + last * t.last_backward + (q + turns) * wait
        if j == pipe.pivots - 1:
            fill_last, drain_last = fill, drain
        # By the last rank: its way instead, and what the detour from there is longer than staying.
        left, nearer = m * v - turns, (p - 1.0 - q) * (lag + wait)
        ahead_ends, back_ends = (t.last_forward - wait, t.first_forward), (t.last_backward, t.first_backward - wait)
        at_start = fill_last - fill + nearer + _longer(start, (t.forward, *ahead_ends), (t.backward, *back_ends))
        at_end = drain_last - drain + nearer + _longer(end, (t.backward, *back_ends), (t.forward, *ahead_ends))
        at_start = np.where(start[:, 0] <= left, np.maximum(at_start, 0.0), 0.0)
        at_end = np.where(end[:, 0] <= left, np.maximum(at_end, 0.0), 0.0)
        both = start[:, 0] + end[:, 0] < left
        ends = np.where(both, at_start + at_end, np.maximum(at_start, at_end))
        total = fill + m * (down + up) - warm_down - warm_back + drain + ends
        best = np.where(left >= 0.0, np.maximum(best, total), best)
        slowest = np.maximum(slowest, down + up)
    # All but one of the groups of PP micro-batches go down while others come back, and on entering and leaving a way
    # round is not whole: m / p - 2 rounds are, in which the slowest way sets the pace.
    rounds = np.maximum(m / p - 2.0, 0.0)
    whole = best + rounds * np.maximum(_round(pipe, layer, wait + lag) - p * slowest, 0.0)
    return np.asarray(whole - (m - pipe.m) * slowest)


def _longer(detour: Floats, ahead_s: tuple[Floats, Floats, Floats], back_s: tuple[Floats, Floats, Floats]) -> Floats:
    """Seconds, but for sends, of a Detour, by what a layer, the last and the first stage take."""
    _, ahead, back, last_ahead, last_back, first_ahead, first_back = detour.T
    more = ahead * ahead_s[0] + last_ahead * ahead_s[1] - first_ahead * ahead_s[2]
    return np.asarray(more + back * back_s[0] + last_back * back_s[1] - first_back * back_s[2])


def _round(pipe: AlikePipelines, layer: Floats, send: Floats) -> Floats:
    """Seconds of a group of PP micro-batches on the slowest way round that does not stay on one rank.

    In each phase but one such a way goes up through a chunk with its gradients, down through one with its
    activations, or stays for PP turns on the first or the last rank, whichever is heavier.
    """
    t, p, split_row = pipe.times, pipe.p, pipe.split_row
    phases = pipe.splits.phases
    at_last = phases.times[split_row, 0] > 1.0
    ends = np.where(at_last, t.last_forward + t.last_backward, t.first_forward + t.first_backward)
    lost = pipe.splits.uneven[split_row]
    total = p * (phases.forward[split_row, 0] * t.forward + phases.backward[split_row, 0] * t.backward + ends)
    total -= np.where(lost > 0, lost * layer - 2.0 * send, 0.0)
    for kind in range(1, phases.times.shape[1]):
        times, forward, backward, down, up = (column[split_row, kind] for column in phases)
        stays = p * (forward * t.forward + backward * t.backward)
        total += times * np.maximum(np.maximum(down * t.forward, up * t.backward) + p * send, stays)
    return np.asarray(total)


_FORMULAS: dict[Schedule, Callable[[AlikePipelines], Floats]] = {
    "gpipe": _gpipe,
    "1f1b": _paced,
    "zero_bubble": _paced,
    "interleaved": _interleaved,
}
