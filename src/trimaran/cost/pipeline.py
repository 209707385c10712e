"""Closed form of a pipeline's iteration: fill and drain, the slowest stage, and sends that are not hidden.

trimaran.cost.simulate plays the same schedules event by event; tests hold the two within 3%.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trimaran.cost.grid import Floats, LayoutGrid
from trimaran.layout import SCHEDULES


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on a rank of the first, each middle and the last stage; arrays over layouts.

    The middle is the largest of the middle stages; `middle_share` is what their mean is of it.
    Forward and backward (recomputation included) hold everything a rank is busy with, TP collectives too.
    `weight` is the part of a backward that zero-bubble schedules may put off. `blocks` says that a rank waits
    while it sends, as Megatron-LM's synchronous exchanges do. `crowding` says how many times
    longer these take because other stages work at once on the same cores; 1 where each stage has its own.
    """

    forward: tuple[Floats, Floats, Floats]
    backward: tuple[Floats, Floats, Floats]
    weight: tuple[Floats, Floats, Floats]
    middle_share: Floats
    send_held: Floats
    send_arrives: Floats
    blocks: bool
    crowding: Floats


@dataclass(frozen=True)
class PipelineTime:
    """Seconds of all micro-batches: `busy` of the slowest stage, waiting for sends, and the bubble."""

    total: Floats
    busy: Floats
    sends: Floats
    bubble: Floats


def pipeline_time(grid: LayoutGrid, times: StageTimes) -> PipelineTime:
    """Time from the first forward to the last backward, for every layout of the grid."""
    m = grid.micro_batches.astype(np.float64)
    first, middle, last = (f + b for f, b in zip(times.forward, times.backward, strict=True))
    middle = np.where(grid.pp > 2, middle, 0.0)
    slowest = np.where(grid.pp > 1, np.maximum(np.maximum(first, middle), last), last)
    busy = m * slowest
    zero = np.zeros(len(grid))
    with_sends = _shared_total(grid, times, m, busy, times.send_held, times.send_arrives)
    without = _shared_total(grid, times, m, busy, zero, zero)
    total = np.where(grid.pp > 1, with_sends, busy)
    without = np.where(grid.pp > 1, without, busy)
    return PipelineTime(total=total, busy=busy, sends=total - without, bubble=without - busy)


def _shared_total(
    grid: LayoutGrid, times: StageTimes, m: Floats, busy: Floats, held: Floats, arrives: Floats
) -> Floats:
    """The pipeline's time where stages may share cores: the larger of two bounds.

    The cores never rest: all stages' work at their crowded pace. Or the stages wait for each other and for the
    network, and whoever works then has the cores to itself.
    """
    if np.all(times.crowding <= 1.0):
        return _total(grid, times, m, held, arrives)

    def alone(of: tuple[Floats, Floats, Floats]) -> tuple[Floats, Floats, Floats]:
        return of[0] / times.crowding, of[1] / times.crowding, of[2] / times.crowding

    waiting = replace(times, forward=alone(times.forward), backward=alone(times.backward), weight=alone(times.weight))
    return np.maximum(busy, _total(grid, waiting, m, held, arrives))


def _total(grid: LayoutGrid, times: StageTimes, m: Floats, held: Floats, arrives: Floats) -> Floats:
    p, v = grid.pp.astype(np.float64), grid.vpp.astype(np.float64)
    kind = grid.schedule
    total = _one_f_one_b(times, p, m, held, arrives)
    for name, formula in (("gpipe", _gpipe), ("interleaved", _interleaved), ("zero_bubble", _zero_bubble)):
        chosen = kind == SCHEDULES.index(name)
        if chosen.any():
            total = np.where(chosen, formula(times, p, v, m, held, arrives), total)
    return total


def _sum(of: tuple[Floats, Floats, Floats], p: Floats, middle_share: Floats) -> Floats:
    return of[0] + (p - 2.0) * of[1] * middle_share + of[2]


def _largest(of: tuple[Floats, Floats, Floats], p: Floats) -> Floats:
    return np.maximum(np.maximum(of[0], np.where(p > 2, of[1], 0.0)), of[2])


def _with_sends(of: tuple[Floats, Floats, Floats], down: Floats, up: Floats) -> tuple[Floats, Floats, Floats]:
    """Stage times with what each spends on sending down (all but the last) and up (all but the first)."""
    return of[0] + down, of[1] + down + up, of[2] + up


def _one_f_one_b(times: StageTimes, p: Floats, m: Floats, held: Floats, arrives: Floats) -> Floats:
    """One micro-batch through all stages and back, then one period per further micro-batch.

    Stage p - k keeps k micro-batches in flight, so that k of them take at least one round trip from it to
    the last stage and back. The period is the largest of the slowest stage, the round trips over k, and
    what a link carries.
    """
    c = tuple(f + b for f, b in zip(times.forward, times.backward, strict=True))
    c = (c[0], c[1], c[2])
    through = _sum(c, p, times.middle_share)
    blocked = arrives if times.blocks else np.zeros_like(arrives)
    own = np.maximum(_largest(_with_sends(c, blocked, blocked), p), held)
    # (micro-batches in flight, one round trip of them) from the last stage but one, the second and the first.
    trips = (
        (np.minimum(p, 2.0), c[1] * (p > 2) + c[0] * (p <= 2) + c[2] + 2.0 * arrives),
        (np.maximum(p - 1.0, 1.0), through - c[0] + 2.0 * (p - 2.0) * arrives),
        (p, through + 2.0 * (p - 1.0) * arrives),
    )
    # A round trip longer than its micro-batches' work repeats once per k of them, and only while more follow.
    waits = [np.floor((m - 1.0) / k) * np.maximum(trip - k * own, 0.0) for k, trip in trips]
    steady = (m - 1.0) * own + np.maximum(np.maximum(waits[0], waits[1]), waits[2])
    return np.asarray(through + 2.0 * (p - 1.0) * arrives + steady)


def _gpipe(times: StageTimes, p: Floats, v: Floats, m: Floats, held: Floats, arrives: Floats) -> Floats:
    """All forwards, then all backwards; each sweep is paced by its slowest stage or by a link."""
    blocked = arrives if times.blocks else np.zeros_like(arrives)
    zero = np.zeros_like(arrives)
    slowest_forward = _largest(_with_sends(times.forward, blocked, zero), p)
    slowest_backward = _largest(_with_sends(times.backward, zero, blocked), p)
    forward = _sum(times.forward, p, times.middle_share) + (m - 1.0) * np.maximum(slowest_forward, held)
    backward = _sum(times.backward, p, times.middle_share) + (m - 1.0) * np.maximum(slowest_backward, held)
    return forward + backward + 2.0 * (p - 1.0) * arrives


def _interleaved(times: StageTimes, p: Floats, v: Floats, m: Floats, held: Floats, arrives: Floats) -> Floats:
    """1F1B whose fill and drain shrink by v, and whose sends are v times as many.

    Narayanan et al., arXiv 2104.04473, section 2.2: bubble (p - 1)(F + B) / v.
    """
    c = tuple(f + b for f, b in zip(times.forward, times.backward, strict=True))
    stages = (c[0], c[1], c[2])
    blocked = arrives if times.blocks else np.zeros_like(arrives)
    # Each chunk is sent on and its gradient back, but for the last chunk's output and the first one's input.
    ends = (2.0 * v - 1.0) * blocked
    own = np.maximum(_largest((c[0] + ends, c[1] + 2.0 * v * blocked, c[2] + ends), p), v * held)
    through = _sum(stages, p, times.middle_share) - _largest(stages, p)
    return m * own + (through + 2.0 * (p - 1.0) * blocked) / v + 2.0 * (p - 1.0) * arrives


def _zero_bubble(times: StageTimes, p: Floats, v: Floats, m: Floats, held: Floats, arrives: Floats) -> Floats:
    """ZB-H1: weight gradients fill the drain, so a stage's fill costs F + B - W in place of F + B + W.

    Qi et al., arXiv 2401.10241, table 1; here B holds W.
    """
    plain = _one_f_one_b(times, p, m, held, arrives)
    saved = 2.0 * (_sum(times.weight, p, times.middle_share) - _largest(times.weight, p))
    c = tuple(f + b for f, b in zip(times.forward, times.backward, strict=True))
    return np.maximum(plain - saved, m * _largest((c[0], c[1], c[2]), p))
