"""Paths through 1F1B and zero-bubble ZB-H1: down to one rank, the pivot, through its micro-batches, and up again."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from trimaran.cost.grid import Floats, Ints
from trimaran.cost.pipeline.pipelines import AlikePipelines

# A round trip that gains less of a micro-batch's work gains nothing.
_ROUND_OFF = 1e-9


class _Pivot(NamedTuple):
    """A rank, its layers, and those of the ranks before and behind it."""

    rank: Floats
    layers: Floats
    before: Floats
    behind: Floats


class _Stay(NamedTuple):
    """Seconds of ranks of a run: of a micro-batch down, of one back with its weights' gradients, and of both.

    `whole`: of all micro-batches; `but_one`: of all but one, of each the shorter way.
    """

    down: Floats
    back: Floats
    work: Floats
    whole: Floats
    but_one: Floats


class PacedPaths:
    """Paths through 1F1B by one pivot each.

    Under zero-bubble rank q puts weight gradients off by q micro-batches: they delay neither the way down and up nor
    round trips and are done, q + 1 of them, after the last backward.
    Rank q keeps k = p - q micro-batches in flight. A round trip from it to the last stage spares it the work of
    k - 1 micro-batches: at the start their forwards, at the end their backwards, in between both; one to a rank
    n - 1 behind it that of n - 1. An eager 1F1B keeps 2 k - 1, and a round trip spares it twice as many.
    """

    def __init__(self, pipe: AlikePipelines) -> None:
        t, split_row = pipe.times, pipe.split_row
        self.t, self.m, self.p, self.blocks = t, pipe.m, pipe.p, pipe.blocks
        self.ahead = 2.0 if t.eager and pipe.schedule == "1f1b" else 1.0
        self.puts_off = pipe.schedule == "zero_bubble"
        table = np.stack(pipe.splits.pivots)[:, :, : pipe.pivots]
        self.pivots = [_Pivot(*at) for at in np.ascontiguousarray(table.transpose(2, 0, 1))[:, :, split_row]]
        self.last = pipe.pivots - 1
        # Round trips lead to the last rank of a run of equal ranks: the first and the last rank, and of the three
        # pivots of each run between them the third.
        self.run_ends = [*range(0, self.last, 3), self.last]
        self.wait: Floats | float = t.send_arrives if pipe.blocks else 0.0
        self.layer_up = t.backward - t.weight if self.puts_off else t.backward
        self.layer = t.forward + self.layer_up
        self.two_sends = 2.0 * t.send_arrives
        self.first_up = t.first_backward - self.wait
        self.first_stage = t.first_forward + self.first_up
        self.last_stage = t.last_forward + t.last_backward - self.wait
        self.first_weights = pipe.splits.first[split_row] * t.weight if self.puts_off else 0.0
        self._stays: dict[int, _Stay] = {}

    def by(self, pivot: int) -> Floats:
        """Seconds of the longest path that stays with a pivot for all micro-batches, but for round trips."""
        q, layers, before, behind = self.pivots[pivot]
        stay = self._stay(pivot)
        path = stay.whole
        if self.puts_off:
            # The end: the weight gradients that the pivot still has, or up to the first rank and one of its own.
            weights, sends = layers * self.t.weight, q * self.t.send_arrives
            fill = before * self.t.forward + self.t.first_forward + sends if pivot else 0.0
            drain = before * self.layer_up + self.first_up + sends if pivot else 0.0
            put_off = np.minimum(q + 1.0, self.m) * weights
            path = path + fill + np.maximum(drain + self.first_weights - put_off, 0.0)
        elif pivot:
            path = path + (before * self.layer + self.first_stage + q * self.two_sends)
        if pivot == self.last:
            return np.asarray(path)
        behind_it = self.p - q - 1.0
        round_trip = behind * self.layer + self.last_stage + behind_it * self.two_sends
        spared = self.ahead * behind_it
        between = self.m - 2.0 - spared
        longer = np.maximum(round_trip - stay.but_one, 0.0)
        several = np.flatnonzero(between >= 0.0)
        if len(several):
            trip, spared = round_trip[several], spared[several]
            at_start = np.maximum(trip - spared * stay.down[several], 0.0)
            at_end = np.maximum(trip - spared * stay.back[several], 0.0)
            longer[several] = at_start + at_end + self._gained_between(pivot, several, between[several])
        return np.asarray(path + longer)

    def _stay(self, pivot: int) -> _Stay:
        """What ranks of the pivot's run take."""
        run = self.run_ends[bisect_left(self.run_ends, pivot)]
        if run not in self._stays:
            t, wait, layers = self.t, self.wait, self.pivots[pivot].layers
            down, up = layers * t.forward + wait, layers * self.layer_up + wait
            if run == 0:
                down, up = down + t.first_forward, up + self.first_up
            if run == self.last:
                down, up = down + (t.last_forward - wait), up + t.last_backward
            back = up + layers * t.weight if self.puts_off else up
            work = down + back if self.blocks else np.maximum(down + back, t.send_held)
            self._stays[run] = _Stay(down, back, work, self.m * work, (self.m - 1.0) * np.minimum(down, back))
        return self._stays[run]

    def _gained_between(self, pivot: int, rows: Ints, micro_batches: Floats) -> Floats:
        """Seconds by which round trips to ranks behind make paths longer, in so many micro-batches in between."""
        gained = np.zeros(len(rows))
        q, behind, work = (each[rows] for each in (*self.pivots[pivot][::3], self._stay(pivot).work))
        layer, last_stage, two_sends = (each[rows] for each in (self.layer, self.last_stage, self.two_sends))
        least, each_trip = _ROUND_OFF * work, two_sends - self.ahead * work
        for end in self.run_ends:
            if end <= pivot:
                continue
            target = self.pivots[end]
            trips = target.rank[rows] - q
            gain = (behind - target.behind[rows]) * layer + trips * each_trip
            if end == self.last:
                gain += last_stage
            # Most pivots have as much to do as the ranks behind them: nothing is gained, but for round-off.
            gains = np.flatnonzero(gain > least)
            if not len(gains):
                continue
            there, left = self.ahead * trips[gains], micro_batches[gains]
            laps = np.floor(left / (there + 1.0))
            laps += np.maximum(left - laps * (there + 1.0) - 1.0, 0.0) / np.maximum(there, 1.0)
            gained[gains] = np.maximum(gained[gains], laps * gain[gains])
        return gained
