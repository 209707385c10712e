"""Longest ways through the warm-up of an interleaved pipeline, by stage split.

Rank q of p, with v chunks, runs w = 2 (p - 1 - q) + (v - 1) p + 1 forwards until its first backward (Narayanan et al.,
arXiv 2104.04473, section 2.2), turn u of them in chunk floor(u / p) mod v. Each waits for the rank's turn before and
for what is sent to it, so the end of turn u of rank r is

    T(r, u) = forward(r, u) + max( T(r, u - 1), T(r - 1, u) + send ),    T(0, u) from T(p - 1, u - p) + send too.

Unrolled this is the longest of many ways from T(0, 0): one way stays with a rank for turns, goes on to the next, and
passes the last rank once for each chunk that it goes down whole. Staying pays off where layers are many, going down
where they are few or sends are slow: with uneven stages the longest way does both. The cool-down, read from its end, is
the same recurrence of backwards: its chunks come in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Split(NamedTuple):
    """Layers of each virtual stage in pipeline order, over how many ranks, and whether these hold them folded."""

    ranks: int
    layers: tuple[int, ...]
    folded: bool = False

    def of_rank(self, rank: int, stages: Sequence[int]) -> tuple[int, ...]:
        """Of one number a stage those of the stages that a rank holds, its first chunk first."""
        return (stages[rank], stages[-1 - rank]) if self.folded else tuple(stages[rank :: self.ranks])


# What a send and the first stage's own work take, in layers: which way is longest depends on them, and its counts are
# kept for each pair. A link as fast as a layer's hundredth, usual ones, and one as slow as a layer.
_SEND = (1 / 64, 1 / 16, 1 / 4, 1.0)
_FIRST = (1 / 32, 1 / 4, 1 / 8, 1 / 8)
# A way's value is one integer: its length, in parts of a layer, above the counts of its sends and of its visits to the
# first stage. So the largest brings its own counts along.
_VISIT, _HOP, _PART, _LAYER = 1, 1 << 12, 1 << 26, 1 << 36
# Which of the ways is taken, and what a backward is over a forward, where a choice comes before either is known.
_USUAL_WAY, _USUAL_RATIO = 1, 2.5
_NOWHERE = np.int64(-(1 << 62))


class WarmUps(NamedTuple):
    """Ranks that may pace an interleaved pipeline, and their warm-ups; arrays (splits, pivots).

    `rank` holds `rank_layers` layers. Until its first backward it runs `turns` forwards of `layers` in all,
    `firsts` of them in the first virtual stage and `lasts` in the last. The longest ways through all ranks to the last
    of these turns, arrays (splits, pivots, ways), have `way_layers`, `way_sends` and `way_firsts`. `start` and `end`
    are detours, arrays (splits, pivots, 7): see Detour.
    """

    rank: NDArray[np.float64]
    rank_layers: NDArray[np.float64]
    turns: NDArray[np.float64]
    layers: NDArray[np.float64]
    firsts: NDArray[np.float64]
    lasts: NDArray[np.float64]
    way_layers: NDArray[np.float64]
    way_sends: NDArray[np.float64]
    way_firsts: NDArray[np.float64]
    start: NDArray[np.float64]
    end: NDArray[np.float64]


class Detour(NamedTuple):
    """A way to rank q through the last rank: it stays there for `turns`, then goes up with gradients.

    Against staying with q for as long, from the ends of both warm-ups on: `ahead` and `back` layers of forwards and
    backwards more, `last_ahead` and `last_back` visits to the last stage more, `first_ahead` and `first_back` to the
    first stage less. The same way from q to the last rank at the end of all is told from the end: its forwards are
    backwards.
    """

    turns: float
    ahead: float
    back: float
    last_ahead: float
    last_back: float
    first_ahead: float
    first_back: float


def warm_ups(splits: tuple[Split, ...]) -> tuple[WarmUps, NDArray[np.int64]]:
    """The warm-ups of each split, a split with fewer pivots repeating its last; and how many it has."""
    rows = [_warm_ups(split) for split in splits]
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    table = np.stack([row[np.minimum(np.arange(counts.max()), len(row) - 1)] for row in rows])
    columns = np.split(table, [1, 2, 3, 4, 5, 6, *(6 + len(_SEND) * (i + 1) for i in range(3)), -7], axis=2)
    single = [column[:, :, 0] for column in columns[:6]]
    return WarmUps(*map(np.ascontiguousarray, [*single, *columns[6:]])), counts


@cache
def _warm_ups(split: Split) -> NDArray[np.float64]:
    """One row for each rank that may pace: the ends of runs of equal ranks, and the two in the middle.

    Before the middle a warm-up reaches into the second group of p micro-batches, behind it it ends in the first.
    """
    p, layers, folded = split
    v = len(layers) // p
    if v == 1 or folded:
        return np.zeros((1, 6 + 3 * len(_SEND) + 14))  # not interleaved, but of the same table
    chunks = [layers[rank::p] for rank in range(p)]
    pivots = {p // 2 - 1, p // 2}
    for _, run in groupby(range(p), key=chunks.__getitem__):
        ranks = list(run)
        pivots |= {ranks[0], ranks[-1]}
    stops = sorted(pivots)
    rows, every = [], _ways(split, stops)
    nearer = np.array([every[-1][_USUAL_WAY] - ways[_USUAL_WAY] for ways in every])
    for rank, ways, detours in zip(stops, every, _detours(split, stops, nearer), strict=True):
        turns = _turns(rank, p, v)
        runs = _runs(turns, p, v)
        ahead = sum(n * held for n, held in zip(runs, chunks[rank], strict=True))
        firsts, lasts = runs[0] * (rank == 0), runs[-1] * (rank == p - 1)
        rows.append((rank, sum(chunks[rank]), turns, ahead, firsts, lasts, *ways, *detours))
    return np.array(rows)


def _runs(turns: int, p: int, v: int) -> list[int]:
    """How many of a rank's first turns are of each chunk, in the order of its turns."""
    periods, rest = divmod(turns, p * v)
    return [periods * p + min(max(rest - chunk * p, 0), p) for chunk in range(v)]


def _detours(split: Split, stops: list[int], nearer: NDArray[np.float64]) -> NDArray[np.float64]:
    """The longest Detour to each stop and from it, one behind the other, shape (stops, 14).

    The way to the last rank is `nearer` layers longer than that to the stop. Detours stay for whole chunks: what a turn
    adds is the same all along one.
    """
    p, layers, _ = split
    table = np.reshape(layers, (-1, p))
    v = len(table)
    ranks, turns = np.array(stops), np.arange(v) * p
    chunk = np.arange(2 * p * (v + 1)) // p % v
    # In the first so many turns: layers down and up of each stop, and turns of the first and of the last chunk.
    down, up = (np.vstack([ranks * 0, table[of][:, ranks].cumsum(axis=0)]) for of in (chunk, v - 1 - chunk))
    of_first, of_last = (np.concatenate([[0], (chunk == end_chunk).cumsum()]) for end_chunk in (0, v - 1))
    since = (2 * (p - 1 - ranks) + (v - 1) * p + 1)[:, None]
    stop = np.arange(len(stops))[:, None]
    ahead = down[since + turns, stop] - down[since, stop]
    behind = table[::-1].cumsum(axis=1)
    back = up[turns + 1, -1] + behind[:, p - 2] - behind[:, ranks].T - up[turns].T
    at_first = (ranks == 0)[:, None]
    ends = (
        of_last[since[-1] + turns] - of_last[since[-1]], of_first[turns + 1],
        (of_first[since + turns] - of_first[since]) * at_first, of_last[turns] * at_first,
    )  # fmt: skip
    columns = (turns, ahead[-1] - ahead, back, *ends)
    detours = np.stack([np.broadcast_to(column, ahead.shape) for column in columns], axis=2) * 1.0
    more, back = nearer[:, None] + detours[:, :, 1], detours[:, :, 2]
    best = [value.argmax(axis=1) for value in (more + _USUAL_RATIO * back, _USUAL_RATIO * more + back)]
    chosen = np.stack([detours[stop[:, 0], index] for index in best], axis=1)
    chosen[-1] = Detour(np.inf, 0, 0, 0, 0, 0, 0)
    return chosen.reshape(len(stops), -1)


def _turns(rank: int, p: int, v: int) -> int:
    return 2 * (p - 1 - rank) + (v - 1) * p + 1


def _ways(split: Split, stops: list[int]) -> list[tuple[float, ...]]:
    """Of the longest ways to the last turn of each stop's warm-up: layers, sends and visits to the first stage.

    Among equal ranks nothing is lost by staying with the first or the last of them alone. So between stops a way goes
    straight on, and the turns of a chunk that a stop stays with are a running maximum.
    """
    p, layers, _ = split
    v = len(layers) // p
    send, first = (_parts(_SEND) * _PART + _HOP)[:, None], (_parts(_FIRST) * _PART + _VISIT)[:, None]
    turn = np.arange(p)
    came = np.full((len(_SEND), p), _NOWHERE)
    came[:, 0] = 0
    stayed = np.full((len(stops), len(_SEND)), _NOWHERE)
    longest = [came[:, 0]] * len(stops)
    for phase in range(v + 1):
        chunk = phase % v
        before = 0
        for at, rank in enumerate(stops):
            layer = layers[chunk * p + rank] * _LAYER
            if rank > before:
                came = came + ((rank - before) * send + (rank - before - 1) * layer)
            cost = layer + first if rank == chunk == 0 else layer
            came[:, 0] = np.maximum(came[:, 0], stayed[at])
            ends = np.maximum.accumulate(came - cost * turn, axis=1) + cost * (turn + 1)
            stayed[at] = ends[:, -1]
            last = _turns(rank, p, v) - 1
            if last // p == phase:
                longest[at] = ends[:, last % p]
            came, before = ends, rank
        # The last chunk's end goes nowhere: its gradients come back.
        came = came + send if chunk < v - 1 else np.full_like(came, _NOWHERE)
    return [_counted(way) for way in longest]


def _counted(way: NDArray[np.int64]) -> tuple[float, ...]:
    visits, sends = way % _HOP, way % _PART // _HOP
    parts = way // _PART - _parts(_SEND) * sends - _parts(_FIRST) * visits
    return (*(parts // 1024).tolist(), *sends.tolist(), *visits.tolist())


def _parts(layers: tuple[float, ...]) -> NDArray[np.int64]:
    return np.array([round(length * 1024) for length in layers])
