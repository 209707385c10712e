"""The distinct stage splits of a grid, as arrays: few splits serve many layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimaran.cost.splits.warm_up import Split, WarmUps, warm_ups


class Pivots(NamedTuple):
    """The first rank; the first, the middle and the last of each run of equal ranks between; the last rank.

    Arrays of shape (splits, pivots).

    `layers`: of the rank itself. `before` and `after`: of the ranks before and behind it in the first chunk, and
    in the last.
    """

    rank: NDArray[np.float64]
    layers: NDArray[np.float64]
    before: NDArray[np.float64]
    after: NDArray[np.float64]


class Phases(NamedTuple):
    """What paths through an interleaved steady state cover while each rank runs PP micro-batches of a chunk.

    Arrays (splits, kinds of phase), layers; each kind comes up `times` in a group of PP micro-batches. `forward` and
    `backward`: of the heavier of the first and the last rank, between which a chunk's end leads directly. `down` and
    `up`: of the chunk that activations go down and gradients go up meanwhile. The first kind is the phase in which the
    path stays on a rank: `times` is then 1 or, where that is the last rank, 2.
    """

    times: NDArray[np.float64]
    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    down: NDArray[np.float64]
    up: NDArray[np.float64]


# Of a backward over a forward, where a path must choose before either is known: 2, and 3 with recomputation.
_USUAL_RATIO = 2.5


@dataclass(frozen=True, eq=False)
class SplitTable:
    """k distinct splits; `first`, `middle` (the largest between) and `last` are layers of whole ranks, shape (k,).

    A rank holds the virtual stages that lie PP apart.
    """

    splits: tuple[Split, ...]

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        ends = [(ranks[0], max(ranks[1:-1], default=0), ranks[-1]) for ranks in map(_rank_layers, self.splits)]
        return np.array(ends, dtype=np.int64).reshape(-1, 3)

    @property
    def first(self) -> NDArray[np.int64]:
        """Layers of the first rank of each split."""
        return self._ranks[:, 0]

    @property
    def middle(self) -> NDArray[np.int64]:
        """Most layers of a rank between the first and the last; 0 where there is none."""
        return self._ranks[:, 1]

    def fullest_between(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ranks between the first and the last of which one is the fullest, that with most layers first, twice (k, n).

        Of ranks that hold less the further down they are, each has more layers than all before it, of the model's
        first `count` or of the others; of ranks that hold more, more than all behind it. A split with fewer of them
        repeats the first; 1 where there is none.
        """
        found = [_fullest_between(split, count) for split in self.splits]
        widest = max(len(ranks) for both in found for ranks in both)
        padded = [[[*ranks, *ranks[:1] * (widest - len(ranks))] for ranks in both] for both in found]
        down, up = np.moveaxis(np.array(padded, dtype=np.int64), 1, 0)
        return down, up

    def first_of_rank(self, index: NDArray[np.int64], rank: NDArray[Any], count: int) -> NDArray[np.float64]:
        """How many of the model's first `count` layers a rank has in the splits at `index`."""
        table = np.zeros((len(self.splits), max(split.ranks for split in self.splits)))
        for row, split in enumerate(self.splits):
            table[row, : split.ranks] = _first_of_ranks(split, count)
        return np.asarray(table[index, rank])

    @property
    def last(self) -> NDArray[np.int64]:
        """Layers of the last rank of each split."""
        return self._ranks[:, 2]

    @cached_property
    def _end_chunks(self) -> NDArray[np.float64]:
        """Layers of the first and the last chunk of every rank, 0 beyond a split's ranks: (k, 2, most ranks)."""
        table = np.zeros((len(self.splits), 2, max(split.ranks for split in self.splits)))
        for row, (p, layers, folded) in enumerate(self.splits):
            last = layers[-p:]
            table[row, 0, :p], table[row, 1, :p] = layers[:p], last[::-1] if folded else last
        return table

    def chunks(self, index: NDArray[np.int64], rank: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Layers of a rank's first chunk and of its last in the splits at `index`."""
        at = np.minimum(np.asarray(rank, dtype=np.int64), self._end_chunks.shape[2] - 1)
        return self._end_chunks[index, 0, at], self._end_chunks[index, 1, at]

    def of_rank(self, index: NDArray[np.int64], rank: NDArray[Any]) -> NDArray[np.float64]:
        """All layers of a rank in the splits at `index`."""
        at = np.minimum(np.asarray(rank, dtype=np.int64), self._end_chunks.shape[2] - 1)
        return np.asarray(self._all_layers[index, at])

    @cached_property
    def _all_layers(self) -> NDArray[np.float64]:
        table = np.zeros((len(self.splits), max(split.ranks for split in self.splits)))
        for row, split in enumerate(self.splits):
            table[row, : split.ranks] = _rank_layers(split)
        return table

    @cached_property
    def first_stage(self) -> NDArray[np.int64]:
        """Layers of the first virtual stage of each split, shape (k,)."""
        return np.array([split.layers[0] for split in self.splits], dtype=np.int64)

    @cached_property
    def fullest_stage(self) -> NDArray[np.int64]:
        """Most layers of a virtual stage of each split, shape (k,)."""
        return np.array([max(split.layers) for split in self.splits], dtype=np.int64)

    def first_layers(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """How many of the model's first `count` layers the first, the fullest middle and the last rank hold.

        Of middle ranks with as many layers, that with fewest of them.
        """
        rows = np.array([_ends_of_first(split, count) for split in self.splits], dtype=np.int64).reshape(-1, 3)
        return rows[:, 0], rows[:, 1], rows[:, 2]

    def first_in_stages(self, index: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """How many of the first `count` layers each virtual stage of the splits at `index` has: as `layers`."""
        layers = self._upright(index, self.layers(index))
        flat = layers.reshape(len(layers), -1)
        before = np.cumsum(flat, axis=1) - flat
        return self._upright(index, np.asarray(np.clip(count - before, 0, flat).reshape(layers.shape)))

    def _upright(self, index: NDArray[np.int64], stages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Stages by chunk and rank in pipeline order, or such stages by rank again, of the splits at `index`."""
        turned = stages.copy()
        for row in np.flatnonzero([self.splits[i].folded for i in index]):
            p = self.splits[index[row]].ranks
            turned[row, 1, :p] = stages[row, 1, :p][::-1]
        return turned

    @cached_property
    def totals(self) -> NDArray[np.int64]:
        """All layers of each split."""
        return np.array([sum(split.layers) for split in self.splits], dtype=np.int64)

    @cached_property
    def phases(self) -> Phases:
        """Phases of a steady interleaved schedule, of each split."""
        rows = [_phases(split) for split in self.splits]
        widest = max(map(len, rows))
        table = np.array([[*row, *[(0.0,) * 5] * (widest - len(row))] for row in rows])
        return Phases(*np.ascontiguousarray(np.moveaxis(table, 2, 0)))

    @cached_property
    def uneven(self) -> NDArray[np.float64]:
        """Layers that changing between the first and the last rank costs such a path, 0 where it never does."""
        return np.array([_changing(split) for split in self.splits])

    @cached_property
    def pivots(self) -> Pivots:
        """Ranks that may pace a pipeline, of each split: shapes (k, most pivots of a split)."""
        rows = [_pivots(split) for split in self.splits]
        widest = max(map(len, rows))
        # A split with fewer pivots repeats its last.
        table = np.array([[*row, *[row[-1]] * (widest - len(row))] for row in rows], dtype=np.float64)
        return Pivots(*np.ascontiguousarray(np.moveaxis(table, 2, 0)))

    @cached_property
    def _warm_ups(self) -> tuple[WarmUps, NDArray[np.int64]]:
        return warm_ups(self.splits)

    @property
    def warm_ups(self) -> WarmUps:
        """Warm-ups of the ranks that may pace an interleaved pipeline, of each split."""
        return self._warm_ups[0]

    @property
    def warm_up_counts(self) -> NDArray[np.int64]:
        """How many such ranks each split has, shape (k,)."""
        return self._warm_ups[1]

    @cached_property
    def pivot_counts(self) -> NDArray[np.int64]:
        """How many pivots each split has, shape (k,)."""
        return np.array([len(_pivots(split)) for split in self.splits], dtype=np.int64)

    def layers(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Layers of each rank's chunks in the splits at `index`: (n, chunks, ranks), 0 where a split has fewer."""
        used, inverse = np.unique(index, return_inverse=True)
        chosen = [self.splits[i] for i in used]
        ranks = max((split.ranks for split in chosen), default=1)
        chunks = max((len(split.layers) // split.ranks for split in chosen), default=1)
        table = np.zeros((len(chosen), chunks, ranks), dtype=np.int64)
        for row, (p, layers, folded) in enumerate(chosen):
            by_chunk = np.reshape(layers, (-1, p))
            table[row, : len(by_chunk), :p] = by_chunk
            if folded:
                table[row, 1, :p] = by_chunk[1, ::-1]
        return table[inverse]


@cache
def _rank_layers(split: Split) -> tuple[int, ...]:
    return tuple(sum(split.of_rank(rank, split.layers)) for rank in range(split.ranks))


@cache
def _first_of_ranks(split: Split, count: int) -> tuple[int, ...]:
    before = accumulate(split.layers, initial=0)
    of_stage = [min(max(count - start, 0), held) for start, held in zip(before, split.layers, strict=False)]
    return tuple(sum(split.of_rank(rank, of_stage)) for rank in range(split.ranks))


@cache
def _ends_of_first(split: Split, count: int) -> tuple[int, int, int]:
    held = _first_of_ranks(split, count)
    between = list(zip(_rank_layers(split), held, strict=True))[1:-1]
    _, fewest = max(((layers, -few) for layers, few in between), default=(0, 0))
    return held[0], -fewest, held[-1]


@cache
def _fullest_between(split: Split, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    held = zip(_rank_layers(split), _first_of_ranks(split, count), strict=True)
    # a layer that is not among the first is no smaller than one that is
    ranks = {rank: (layers, layers - first) for rank, (layers, first) in enumerate(held) if 0 < rank < split.ranks - 1}
    down, up = _records(ranks), _records({rank: ranks[rank] for rank in reversed(ranks)})
    return down or (1,), up or (1,)


def _records(sizes: Mapping[int, tuple[int, int]]) -> tuple[int, ...]:
    """The ranks, in their order, that have more of either size than each before; the largest of them first."""
    records: list[int] = []
    for rank, (layers, others) in sizes.items():
        if not any(sizes[before][0] >= layers and sizes[before][1] >= others for before in records):
            records.append(rank)
    return tuple(sorted(records, key=lambda rank: sizes[rank], reverse=True))


@cache
def _pivots(split: Split) -> tuple[tuple[int, ...], ...]:
    """The ends of each run of equal ranks; the first and the last rank, which hold the ends, are separate runs."""
    p, layers, _ = split
    chunks = [layers[rank::p] for rank in range(p)]
    runs = [[rank for rank, _ in run] for _, run in groupby(enumerate(chunks[1:-1], 1), key=lambda item: item[1])]
    between = [rank for run in runs for rank in (run[0], (run[0] + run[-1]) // 2, run[-1])]
    # Layers of all virtual stages before each.
    before = [0, *accumulate(layers)]
    last_chunk = len(layers) - p
    return tuple(
        (rank, sum(chunks[rank]), before[rank], before[-1] - before[last_chunk + rank + 1])
        for rank in (0, *between, p - 1)
    )


def _heavier(split: Split) -> list[tuple[bool, tuple[int, int]]]:
    """By phase: whether the last rank is the heavier, and the chunks' layers that the heavier runs down and up."""
    p, layers, _ = split
    v = len(layers) // p
    first, last = layers[::p], layers[p - 1 :: p]
    by_phase = []
    for phase in range(v):
        here, there = (first[phase], first[-phase]), (last[phase - 1], last[v - 1 - phase])
        at_last = here[0] + _USUAL_RATIO * here[1] <= there[0] + _USUAL_RATIO * there[1]
        by_phase.append((at_last, there if at_last else here))
    return by_phase


@cache
def _phases(split: Split) -> tuple[tuple[float, ...], ...]:
    p, layers, _ = split
    v = len(layers) // p
    chunks = [sum(layers[chunk * p : chunk * p + p]) for chunk in range(v)]
    (at_last, stays), *others = _heavier(split)
    kinds = Counter((*heavier, chunks[phase], chunks[v - 1 - phase]) for phase, (_, heavier) in enumerate(others, 1))
    return ((1.0 + at_last, *stays, 0.0, 0.0), *((float(times), *kind) for kind, times in kinds.items()))


@cache
def _changing(split: Split) -> float:
    on_last = {at_last for at_last, _ in _heavier(split)}
    layers = split.layers
    return min(layers) + 2.0 * (max(layers) - min(layers)) if len(on_last) > 1 else 0.0
