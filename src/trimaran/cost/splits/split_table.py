"""The distinct stage splits of a grid, as arrays: few splits serve many layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

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

    @property
    def last(self) -> NDArray[np.int64]:
        """Layers of the last rank of each split."""
        return self._ranks[:, 2]

    @cached_property
    def totals(self) -> NDArray[np.int64]:
        """All layers of each split."""
        return np.array([sum(layers) for _, layers in self.splits], dtype=np.int64)

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
        """Layers of each virtual stage of the splits at `index`: (n, chunks, ranks), 0 where a split has fewer."""
        used, inverse = np.unique(index, return_inverse=True)
        chosen = [self.splits[i] for i in used]
        ranks = max((ranks for ranks, _ in chosen), default=1)
        chunks = max((len(layers) // p for p, layers in chosen), default=1)
        table = np.zeros((len(chosen), chunks, ranks), dtype=np.int64)
        for row, (p, layers) in enumerate(chosen):
            table[row, : len(layers) // p, :p] = np.reshape(layers, (-1, p))
        return table[inverse]


@cache
def _rank_layers(split: Split) -> tuple[int, ...]:
    ranks, layers = split
    return tuple(sum(layers[rank::ranks]) for rank in range(ranks))


@cache
def _pivots(split: Split) -> tuple[tuple[int, ...], ...]:
    """The ends of each run of equal ranks; the first and the last rank, which hold the ends, are separate runs."""
    p, layers = split
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
    p, layers = split
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
    p, layers = split
    v = len(layers) // p
    chunks = [sum(layers[chunk * p : chunk * p + p]) for chunk in range(v)]
    (at_last, stays), *others = _heavier(split)
    kinds = Counter((*heavier, chunks[phase], chunks[v - 1 - phase]) for phase, (_, heavier) in enumerate(others, 1))
    return ((1.0 + at_last, *stays, 0.0, 0.0), *((float(times), *kind) for kind, times in kinds.items()))


@cache
def _changing(split: Split) -> float:
    on_last = {at_last for at_last, _ in _heavier(split)}
    layers = split[1]
    return min(layers) + 2.0 * (max(layers) - min(layers)) if len(on_last) > 1 else 0.0
