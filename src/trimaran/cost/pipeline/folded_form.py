"""Closed form of folded pipelines (ZB-V, DualPipeV): the rank that paces them, and the ways that are longer.

A way stays with one rank, the pivot, but for round trips as the pipeline fills and drains, on which it spares the pivot
some of its work and takes some of the other ranks' instead. How much of it is linear in the ranks p: the numbers below
are those of the longest ways of pipelines that were played (trimaran.cost.pipeline.folded), whose forwards, backwards,
weight gradients, sends, ends and pivots were of many lengths. The first rank, with both ends, is one pivot, and of the
others the last; the fullest between them is one without round trips. Ranks other than the pivot count as their mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from trimaran.cost.grid import Floats
from trimaran.cost.pipeline.pipelines import Pipelines
from trimaran.cost.pipeline.stage_times import StageTimes
from trimaran.nouns.stack import Schedule

# So many for each rank of the pipeline, and so many besides.
_Number = tuple[int, int]


class _Way(NamedTuple):
    """What a way takes beyond all work of its pivot: a chunk's forwards, backwards without weight gradients, and those.

    `own` of the pivot and `others` of other ranks; `sends` between ranks; `ends`: forwards and backwards of what the
    first stage does besides, and of what the last does.
    """

    own: tuple[_Number, _Number, _Number]
    others: tuple[_Number, _Number, _Number]
    sends: _Number
    ends: tuple[_Number, _Number, _Number, _Number]


_0, _1, _2 = (0, 0), (0, 1), (0, 2)
_P, _Q, _2P, _2Q, _4Q = (1, 0), (1, -1), (2, 0), (2, -2), (4, -4)
_MINUS_P, _MINUS_Q, _MINUS_2P, _MINUS_2Q = (-1, 0), (-1, 1), (-2, 0), (-2, 2)
_STAYS = _Way((_0, _0, _0), (_0, _0, _0), _0, (_0, _0, _0, _0))
_FILLS = _Way((_0, _0, _0), (_Q, _0, _0), _Q, (_1, _0, _0, _0))
_BY_FIRST: Mapping[Schedule, tuple[_Way, ...]] = {
    "zbv": (
        _STAYS,
        _Way((_0, _MINUS_P, (-1, -1)), (_0, _P, (2, -1)), _Q, (_0, _MINUS_P, _0, _0)),
        _Way((_MINUS_2Q, _MINUS_P, (-1, -1)), (_2Q, _P, (2, -1)), (3, -3), (_MINUS_2Q, _MINUS_P, _0, _0)),
        _Way((_0, _MINUS_Q, _MINUS_P), (_0, _2Q, _0), _2Q, (_0, _MINUS_Q, _0, _0)),
        _Way((_MINUS_2Q, _MINUS_Q, _MINUS_P), (_2Q, _2Q, _0), _4Q, (_MINUS_2Q, _MINUS_Q, _0, _0)),
    ),
    "dualpipev": (
        _STAYS,
        _Way((_0, _MINUS_Q, _MINUS_Q), (_0, _2Q, _0), _2Q, (_0, _MINUS_Q, _0, _0)),
        _Way((_MINUS_2Q, _MINUS_Q, _MINUS_Q), (_2Q, _2Q, _0), _4Q, (_MINUS_2Q, _MINUS_Q, _0, _0)),
        _Way(
            ((-3, 1), _MINUS_2Q, (-2, 1)), ((2, -1), _4Q, _P), (6, -6), ((-2, 1), _MINUS_Q, _MINUS_P, _MINUS_Q)
        ),
    ),
}  # fmt: skip
_BY_LAST: Mapping[Schedule, tuple[_Way, ...]] = {
    "zbv": (
        _FILLS,
        _Way((_MINUS_2Q, _0, _0), (_2Q, _Q, _0), (3, -3), (_1, _0, _1, _1)),
        _Way((_MINUS_2P, _0, _0), (_2P, _Q, _0), _Q, ((2, -1), _0, _1, _1)),
        _Way((_MINUS_2Q, (-2, 4), _0), (_2Q, (3, -5), _0), (5, -7), (_1, _0, _1, _1)),
        _Way((_MINUS_2Q, (-2, 4), (-2, 1)), (_2Q, (4, -6), _1), (6, -8), (_1, _1, _1, _1)),
        _Way((_MINUS_2Q, _0, (-2, 1)), (_2Q, _2Q, _1), _4Q, (_1, _1, _1, _1)),
        _Way((_MINUS_2P, _0, (-2, 1)), (_2P, _2Q, _1), _2Q, ((2, -1), _1, _1, _1)),
    ),
    "dualpipev": (
        _FILLS,
        _Way((_0, _0, _MINUS_P), (_Q, _Q, _1), _2Q, (_1, _1, _0, _0)),
        _Way(((-2, 1), _0, _MINUS_P), (_2Q, _2Q, _1), _4Q, (_1, _1, _1, _1)),
        _Way(((-2, -1), _0, _MINUS_P), (_2P, _2Q, _1), _2Q, ((2, -1), _1, _1, _1)),
        _Way(((-2, 1), _MINUS_2Q, _MINUS_2P), (_2Q, _4Q, (1, 1)), (6, -6), (_1, _2, _1, _2)),
        _Way(((-2, -1), _MINUS_2Q, _MINUS_2P), (_2P, _4Q, (1, 1)), _4Q, ((2, -1), _2, _1, _2)),
    ),
}  # fmt: skip


def folded_time(schedule: Schedule, pipelines: Pipelines, t: StageTimes) -> Floats:
    """Seconds of all micro-batches of pipelines of a folded schedule, shape (n,)."""
    p, m = pipelines.ranks * 1.0, pipelines.micro_batches * 1.0
    row, splits = pipelines.split_row, pipelines.splits
    wait = 2.0 * t.send_arrives if schedule in t.blocks else np.zeros(len(p))
    chunk = t.forward, t.backward - t.weight, t.weight
    layer, ends = t.forward + t.backward, (t.first_forward, t.first_backward, t.last_forward, t.last_backward)
    both_ends = ends[0] + ends[1] + ends[2] + ends[3]
    first, middle, last, all_layers = (
        each[row] * 1.0 for each in (splits.first, splits.middle, splits.last, splits.totals)
    )

    def longest(ways: tuple[_Way, ...], pivot: Floats) -> Floats:
        mean = (all_layers - pivot) / (2.0 * p - 2.0)
        own, others = tuple(0.5 * pivot * each for each in chunk), tuple(mean * each for each in chunk)
        seconds = (*own, *others, t.send_arrives, *ends)
        return np.asarray(
            np.maximum.reduce(
                [
                    sum((a * p + b) * each for (a, b), each in zip(_numbers(way), seconds, strict=True) if a or b)
                    + np.zeros(len(p))
                    for way in ways
                ]
            )
        )

    by_first = m * (first * layer + both_ends + wait) + longest(_BY_FIRST[schedule], first)
    by_last = m * (last * layer + wait) + longest(_BY_LAST[schedule], last)
    between = m * (middle * layer + np.where(p > 2, 2.0 * wait, 0.0)) + t.first_forward
    # Of few micro-batches weight gradients fill what would be waits, but for the last one's.
    quick = chunk[0] + chunk[1]
    once = all_layers * quick + both_ends + 0.5 * last * t.weight + (4.0 * p - 4.0) * t.send_arrives
    held = 0.0 if schedule in t.blocks else 2.0 * t.send_held
    pace = np.where(m < 2.0 * p - 1.0, all_layers / p * quick, 0.0)
    few = once + (m - 1.0) * np.maximum(pace, held)
    return np.asarray(np.maximum.reduce([by_first, by_last, between, few]))


def _numbers(way: _Way) -> tuple[_Number, ...]:
    return (*way.own, *way.others, way.sends, *way.ends)
