"""Play many pipelines at once: the schedules of trimaran.cost.simulate as a recurrence over arrays of layouts.

Under each schedule the i-th forward of rank r and its t-th backward depend on nothing later than one step before
them, if rank r starts r steps (1F1B, zero-bubble) or 2r half-steps (interleaved) after the first:

* 1F1B: forward i of rank r at level r + 2i, backward t at level 2p - 1 - r + 2t, or where it is eager and each rank
  has two more in flight than the next, at level 4p - 3 - 3r + 2t;
* interleaved: forward i at step r + i, backward t right after it at step 2(p - 1) - r + (v - 1) p + t.

So a level is a few NumPy operations on (layouts, ranks), and the latest arrival is all that a rank need keep of its
neighbour, the latest two where 1F1B is eager. Such a recurrence is linear in (max, +): once the state of a period ago
differs from today's by the same time everywhere, it does so for ever, and the rest of the steady state is skipped at
that pace. The result equals trimaran.cost.simulate's to rounding, which the tests hold. trimaran.cost.pipeline.folded
plays folded schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from trimaran.cost.grid import Bools, Floats, Ints
from trimaran.cost.pipeline.folded import play_folded
from trimaran.cost.pipeline.runs import PipelineRuns
from trimaran.layout.choices import CHOICE, index_of
from trimaran.nouns.stack import FOLDED

# Before any arrival. Sums with times leave it where it is.
_NEVER = -np.inf
# Layouts played together; of like depth and length, so that little is padded.
_TOGETHER = 160
# States a period apart are one state if they differ by the same time to this share of it.
_SAME = 1e-9
# Micro-batches after which a pace that has not settled exactly is taken as it is.
_LONGEST = 4096


def play(runs: PipelineRuns) -> Floats:
    """Seconds from the first forward to the last backward of each run, shape (n,)."""
    return np.asarray(ends(runs).max(axis=1))


def ends(runs: PipelineRuns) -> Floats:
    """Seconds from the first forward to the last backward of each rank of each run, shape (n, ranks); 0 beyond them.

    Ranks of folded schedules are told as ending with their run.
    """
    total = np.zeros((len(runs.ranks), runs.forward_s.shape[2]))
    m = runs.micro_batches
    kind = np.where(runs.ranks == 1, index_of("schedule", "none"), runs.schedule)
    rounds = m * runs.chunks
    for index in np.unique(kind):
        members, schedule = np.flatnonzero(kind == index), CHOICE["schedule"].value(index)
        if schedule in ("none", "gpipe"):
            last = _sweeps(runs.take(members), piped=schedule == "gpipe")
            total[members, : last.shape[1]] = last
            continue
        if schedule in FOLDED:
            real = np.arange(total.shape[1]) < runs.ranks[members, None]
            total[members] = np.where(real, play_folded(schedule, runs.take(members))[:, None], 0.0)
            continue
        order = members[np.lexsort((rounds[members], runs.ranks[members]))]
        for start in range(0, len(order), _TOGETHER):
            some = order[start : start + _TOGETHER]
            part = runs.take(some)
            player = _Interleaved(part) if schedule == "interleaved" else _OneByOne(part)
            last = player.play()
            total[some, : last.shape[1]] = last
    return total


def _sweeps(runs: PipelineRuns, *, piped: bool) -> Floats:
    """All forwards, then all backwards: flow shops of equal jobs, which the slowest part so far paces."""
    m = runs.micro_batches.astype(np.float64)[:, None]
    work = _Work.of(runs)
    forward, backward = work.forward[:, 0], work.backward[:, 0]
    rank = np.arange(forward.shape[1])
    real = rank < runs.ranks[:, None]
    if not piped:
        return np.where(real, m * (forward + backward).sum(axis=1, keepdims=True), 0.0)
    goes_down = rank < runs.ranks[:, None] - 1
    goes_up = (rank > 0) & real
    down_pace = np.maximum(forward.max(axis=1), (work.down_held * goes_down).max(axis=1))[:, None]
    turned = (forward + work.down_arrives * goes_down).sum(axis=1, keepdims=True) + (m - 1.0) * down_pace
    # From the last rank up: what the ranks behind took once, and the slowest of them and of their links each time.
    up_arrives, up_held = work.up_arrives * goes_up, work.up_held * goes_up
    once = _from_the_last(np.add, backward + up_arrives) - up_arrives
    pace = np.maximum(_from_the_last(np.maximum, backward), _from_the_last(np.maximum, up_held))
    return np.where(real, turned + once + (m - 1.0) * pace, 0.0)


def _from_the_last(combine: np.ufunc, values: Floats) -> Floats:
    """Values of each rank and all behind it, combined, shape (n, ranks)."""
    return np.asarray(combine.accumulate(values[:, ::-1], axis=1)[:, ::-1])


@dataclass(frozen=True)
class _Work:
    """What ranks and links are busy with: as PipelineRuns states it, sends by who sends them, down and up.

    A rank that waits for its sends is busy with them instead, and nothing is left for the link.
    """

    forward: Floats
    backward: Floats
    down_arrives: Floats
    down_held: Floats
    up_arrives: Floats
    up_held: Floats

    @classmethod
    def of(cls, runs: PipelineRuns) -> Self:
        chunks, ranks = runs.forward_s.shape[1:]
        rank, p = np.arange(ranks), runs.ranks[:, None]
        before = np.where(rank == 0, p - 1, rank - 1)
        up_arrives = np.take_along_axis(runs.arrives_s, before, axis=1)
        up_held = np.take_along_axis(runs.held_s, before, axis=1)
        if CHOICE["schedule"].value(runs.schedule[0]) not in runs.blocks:  # runs that are played together have one
            return cls(runs.forward_s, runs.backward_s, runs.arrives_s, runs.held_s, up_arrives, up_held)
        stage = np.arange(chunks)[:, None] * p[:, :, None] + rank
        last = (runs.chunks * runs.ranks - 1)[:, None, None]
        real = (rank < p)[:, None, :]
        forward = runs.forward_s + np.where(real & (stage < last), runs.arrives_s[:, None, :], 0.0)
        backward = runs.backward_s + np.where(real & (stage > 0) & (stage <= last), up_arrives[:, None, :], 0.0)
        none = np.zeros(runs.arrives_s.shape)
        return cls(forward, backward, none, none, none, none)


class _Settling:
    """Watches the state for a period: compares it with one kept before, ever longer ago."""

    def __init__(self, real: Bools, wait: int) -> None:
        self.real, self.next = real, wait
        self.kept: Floats | None = None
        self.at = 0

    def keep(self, now: int, state: Floats) -> None:
        """Take this state as the one to compare later ones with."""
        self.kept, self.at = state, now
        self.next = 2 * now

    def pace(self, state: Floats, rows: Ints) -> tuple[Floats, Bools]:
        """How much later everything is than in the kept state, and in which rows by the same time everywhere."""
        assert self.kept is not None
        real = self.real[rows]
        with np.errstate(invalid="ignore"):  # what never arrives is not real
            later = state[rows] - self.kept[rows]
        most = np.where(real, later, -np.inf).max(axis=1)
        least = np.where(real, later, np.inf).min(axis=1)
        return most, most - least <= _SAME * most


class _OneByOne:
    """1F1B and zero-bubble ZB-H1 over a batch of runs."""

    def __init__(self, runs: PipelineRuns) -> None:
        self.work = work = _Work.of(runs)
        self.forward, self.backward = work.forward[:, 0], work.backward[:, 0]
        self.m, self.p = runs.micro_batches[:, None].copy(), runs.ranks[:, None]
        self.eager = runs.eager and CHOICE["schedule"].value(runs.schedule[0]) == "1f1b"
        self.zero_bubble = runs.schedule[:, None] == index_of("schedule", "zero_bubble")
        self.weight = np.where(self.zero_bubble, runs.weight_s[:, 0], 0.0)
        self.backward = self.backward - self.weight
        n, ranks = self.forward.shape
        self.rank = np.arange(ranks)
        self.real = self.rank < self.p
        # A link is free again before its next send where a stage takes longer than a send holds it.
        quickest = np.where(self.real, np.minimum(self.forward, self.backward), np.inf)
        self.queues = bool((np.maximum(work.down_held, work.up_held) > quickest).any())
        self.free = np.zeros((n, ranks))
        self.down, self.up = np.full((n, ranks + 1), _NEVER), np.full((n, ranks + 1), _NEVER)
        self.down_free, self.up_free = np.full((n, ranks), _NEVER), np.full((n, ranks), _NEVER)
        # what came from behind before the latest, where that is for the next backward
        self.up_before = np.full((n, ranks + 1), _NEVER)
        self.skipped = np.zeros(n)

    def play(self) -> Floats:
        deepest = int(self.p.max())
        settling = _Settling(self._real_state(), (4 if self.eager else 2) * deepest)
        level = 0
        most = int(self.m.max())
        while level < 2 * (most + (2 if self.eager else 1) * (deepest - 1)):
            self._forwards(level)
            self._backwards(level)
            level += 1
            if level % 2 == 0 and level // 2 < most:
                most = self._settle(level // 2, settling)
        # Weight gradients that were put off until after a rank's last backward.
        left = np.minimum(self.rank, self.m) * self.weight
        return np.where(self.real, self.free + left + self.skipped[:, None], 0.0)

    def _forwards(self, level: int) -> None:
        """The forwards of a level: those of every second rank."""
        at = slice(level % 2, min(level + 1, len(self.rank)), 2)
        index = (level - self.rank[at]) // 2
        active = (index < self.m) & self.real[:, at]
        end = np.maximum(self.free[:, at], self.down[:, at]) + self.forward[:, at]
        self.free[:, at] = np.where(active, end, self.free[:, at])
        begins = end
        if self.queues:
            begins = np.maximum(end, self.down_free[:, at])
            self.down_free[:, at] = np.where(active, begins + self.work.down_held[:, at], self.down_free[:, at])
        after = slice(level % 2 + 1, min(level + 1, len(self.rank)) + 1, 2)
        # The last rank sends nothing on, and beyond it nobody is real.
        self.down[:, after] = np.where(active, begins + self.work.down_arrives[:, at], self.down[:, after])

    def _backwards(self, level: int) -> None:
        at = slice((level + 1) % 2, len(self.rank), 2)
        first = 4 * self.p - 3 - 3 * self.rank[at] if self.eager else 2 * self.p - 1 - self.rank[at]
        index = (level - first) // 2
        active = (index >= 0) & (index < self.m) & self.real[:, at]
        # `up[r + 1]` is what rank r + 1 sent to r; the last rank turns on its own forward.
        came = (self.up_before if self.eager else self.up)[:, 1:][:, at]
        end = np.maximum(self.free[:, at], came) + self.backward[:, at]
        after = end + np.where(index >= self.rank[at], self.weight[:, at], 0.0)
        self.free[:, at] = np.where(active, after, self.free[:, at])
        begins = end
        if self.queues:
            begins = np.maximum(end, self.up_free[:, at])
            self.up_free[:, at] = np.where(active, begins + self.work.up_held[:, at], self.up_free[:, at])
        sent = self.up[:, :-1]
        if self.eager:
            self.up_before[:, :-1][:, at] = sent[:, at]
        sent[:, at] = np.where(active, begins + self.work.up_arrives[:, at], sent[:, at])

    def _state(self) -> Floats:
        came = [self.down[:, :-1], self.up[:, 1:], *([self.up_before[:, 1:]] if self.eager else [])]
        return np.concatenate([self.free, *came, self.down_free, self.up_free], axis=1)

    def _real_state(self) -> Bools:
        """Of the state's columns those that hold times: ranks have one, and links the queues where there are any."""
        first, last = self.rank == 0, self.rank == self.p - 1
        links = np.full(self.real.shape, self.queues)
        return np.concatenate(
            [
                self.real, self.real & ~first, self.real & ~last,
                *([self.real & ~last] if self.eager else []), self.real & ~last & links, self.real & ~first & links,
            ],
            axis=1,
        )  # fmt: skip

    def _settle(self, now: int, settling: _Settling) -> int:
        """Skip what is left of the steady state of runs whose state repeats; micro-batches that are left to play."""
        left = (self.m - 1 - now)[:, 0]
        if settling.kept is not None and now - settling.at <= int(self.p.max()):
            rows = np.flatnonzero(left > 0)
            state = self._state()
            later, same = settling.pace(state, rows)
            self._skip(rows[same], later[same], now - settling.at, left)
        elif now >= settling.next:
            state = self._state()
            if now >= _LONGEST and settling.kept is not None:
                rows = np.flatnonzero(left > 0)
                later, _ = settling.pace(state, rows)
                self._skip(rows, later, now - settling.at, left)
            settling.keep(now, state)
        return int(self.m.max())

    def _skip(self, rows: Ints, later: Floats, period: int, left: Ints) -> None:
        periods = left[rows] // period
        self.skipped[rows] += periods * later
        self.m[rows, 0] -= periods * period


class _Interleaved:
    """Interleaved 1F1B, Megatron-LM's order, over a batch of runs."""

    def __init__(self, runs: PipelineRuns) -> None:
        self.work = work = _Work.of(runs)
        self.p, self.v = runs.ranks[:, None], runs.chunks[:, None]
        self.turns = (runs.micro_batches * runs.chunks)[:, None]
        self.period = (runs.ranks * runs.chunks)[:, None]
        n, chunks, ranks = work.forward.shape
        self.rows = np.arange(n)
        self.rank = np.arange(ranks)
        self.real = self.rank < self.p
        self.late = 2 * (self.p - 1) - self.rank + (self.v - 1) * self.p
        steps, period = self._by_step(runs.ranks, runs.chunks)
        self.forward, self.forward_chunk = self._table(work.forward, steps, period, -self.rank, downwards=True)
        self.backward, self.backward_chunk = self._table(work.backward, steps, period, -self.late, downwards=False)
        used = (np.arange(chunks)[:, None] < runs.chunks[:, None, None]) & self.real[:, None, :]
        quickest = np.where(used, np.minimum(work.forward, work.backward), np.inf).min(axis=1)
        self.queues = bool((np.maximum(work.down_held, work.up_held) > quickest).any())
        self.free = np.zeros((n, ranks))
        self.down, self.up = np.full((n, ranks), _NEVER), np.full((n, ranks), _NEVER)
        self.down_free, self.up_free = np.full((n, ranks), _NEVER), np.full((n, ranks), _NEVER)
        self.skipped = np.zeros(n)

    @staticmethod
    def _by_step(ranks: Ints, chunks: Ints) -> tuple[Ints, Ints]:
        """Steps of the longest period, and each run's own period, shapes (steps,) and (n, 1, 1)."""
        period = ranks * chunks
        return np.arange(int(period.max())), period[:, None, None]

    def _table(
        self, times: Floats, steps: Ints, period: Ints, offset: Ints, *, downwards: bool
    ) -> tuple[Floats, NDArray[np.int32]]:
        """Times and chunks by step within a period and rank: (n, steps, ranks). Rank r is `offset` steps ahead."""
        position = (steps[None, :, None] + np.broadcast_to(offset, self.real.shape)[:, None, :]) % period
        chunk = position // self.p[:, :, None]
        if not downwards:
            chunk = self.v[:, :, None] - 1 - chunk
        table = times[self.rows[:, None, None], np.minimum(chunk, times.shape[1] - 1), self.rank]
        return np.ascontiguousarray(table), chunk.astype(np.int32)

    def play(self) -> Floats:
        deepest, longest = int(self.p.max()), int(self.period.max())
        settling = _Settling(self._real_state(), 3 * longest)
        fill = 2 * (deepest - 1) + longest
        step = 0
        while step < int(self.turns.max()) + fill:
            self._forwards(step)
            self._backwards(step)
            step += 1
            if step < int(self.turns.max()):
                self._settle(step, settling)
        return np.where(self.real, self.free + self.skipped[:, None], 0.0)

    def _forwards(self, step: int) -> None:
        at = step % self.period[:, 0]
        active = (step >= self.rank) & (step - self.rank < self.turns) & self.real
        chunk = self.forward_chunk[self.rows, at]
        came = np.where((self.rank == 0) & (chunk == 0), _NEVER, self.down)
        end = np.maximum(self.free, came) + self.forward[self.rows, at]
        sends = active & ~((self.rank == self.p - 1) & (chunk == self.v - 1))
        self.free = np.where(active, end, self.free)
        begins = self._queue(end, self.down_free, self.work.down_held, sends)
        self.down = self._to_next(begins + self.work.down_arrives, sends, self.down)

    def _backwards(self, step: int) -> None:
        at = step % self.period[:, 0]
        active = (step >= self.late) & (step - self.late < self.turns) & self.real
        chunk = self.backward_chunk[self.rows, at]
        came = np.where((self.rank == self.p - 1) & (chunk == self.v - 1), _NEVER, self.up)
        end = np.maximum(self.free, came) + self.backward[self.rows, at]
        sends = active & ~((self.rank == 0) & (chunk == 0))
        self.free = np.where(active, end, self.free)
        begins = self._queue(end, self.up_free, self.work.up_held, sends)
        self.up = self._to_previous(begins + self.work.up_arrives, sends, self.up)

    def _queue(self, end: Floats, link_free: Floats, held: Floats, sends: Bools) -> Floats:
        if not self.queues:
            return end
        begins = np.maximum(end, link_free)
        np.copyto(link_free, begins + held, where=sends)
        return begins

    def _to_next(self, there: Floats, sends: Bools, before: Floats) -> Floats:
        """What each rank last received from the one before it; the first from the last."""
        last = self.p[:, 0] - 1
        came = np.empty_like(before)
        came[:, 1:] = np.where(sends[:, :-1], there[:, :-1], before[:, 1:])
        came[:, 0] = np.where(sends[self.rows, last], there[self.rows, last], before[:, 0])
        return came

    def _to_previous(self, there: Floats, sends: Bools, before: Floats) -> Floats:
        last = self.p[:, 0] - 1
        came = np.empty_like(before)
        came[:, :-1] = np.where(sends[:, 1:], there[:, 1:], before[:, :-1])
        came[self.rows, last] = np.where(sends[:, 0], there[:, 0], before[self.rows, last])
        return came

    def _state(self) -> Floats:
        return np.concatenate([self.free, self.down, self.up, self.down_free, self.up_free], axis=1)

    def _real_state(self) -> Bools:
        links = self.real & self.queues
        return np.concatenate([self.real, self.real, self.real, links, links], axis=1)

    def _settle(self, now: int, settling: _Settling) -> None:
        """As for 1F1B; a period is PP micro-batches through every chunk, or a few of those."""
        left = (self.turns - 1 - now)[:, 0]
        period, longest = self.period[:, 0], int(self.period.max())
        ago = now - settling.at
        if settling.kept is not None:
            enough = _LONGEST * int(self.v.max())
            long = now >= enough and 4 * ago >= enough
            rows = np.flatnonzero((left >= ago) & (ago % period == 0) & ((ago <= 4 * period) | long))
            if len(rows):
                later, same = settling.pace(self._state(), rows)
                same |= long
                self._skip(rows[same], later[same], ago, left)
        if now >= settling.next and (settling.kept is None or ago > 4 * longest):
            settling.keep(now, self._state())

    def _skip(self, rows: Ints, later: Floats, period: int, left: Ints) -> None:
        periods = left[rows] // period
        self.skipped[rows] += periods * later
        self.turns[rows, 0] -= periods * period
