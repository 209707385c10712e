"""The steady state of a pipeline: what a rank repeats once it is full, however many micro-batches there are."""

from __future__ import annotations

from typing import NamedTuple

from trimaran.layout.schedule import NEEDS, Action, actions
from trimaran.nouns.stack import Schedule


class Shortened(NamedTuple):
    """A rank's actions with fewer micro-batches, which are all of its actions where a part is repeated.

    Actions `begin` to `end` - 1 of the `micro_batches` are done `more` times again, on the next micro-batches.
    """

    micro_batches: int
    begin: int
    end: int
    more: int


def shortened(schedule: Schedule, rank: int, ranks: int, stages: int, micro_batches: int) -> Shortened:
    """The fewest micro-batches with a steady state in which nothing is the first or the last of its kind.

    What is repeated is neither next to a micro-batch that comes first nor finishes one that comes last, so that what
    a rank does once in an iteration is not in it; and something is still to be received behind it. Where there is no
    such state, as under GPipe, all of them.
    """
    step = NEEDS[schedule].turn(ranks)
    whole = actions(schedule, rank, ranks, stages, micro_batches)
    length = step * len(whole) // micro_batches
    for fewer in range(step + micro_batches % step, micro_batches, step):
        few = actions(schedule, rank, ranks, stages, fewer)
        more = (micro_batches - fewer) // step
        for begin in range(length, len(few) - length + 1):
            end = begin + length
            before, period = few[begin - length : begin], few[begin:end]
            if (
                period == _later(before, step)
                and any(action.kind == "forward" for action in few[end:])
                and all(action.micro_batch < fewer - 1 for action in period if action.kind != "forward")
                and whole == (*few[:begin], *_repeated(period, more + 1, step), *_later(few[end:], more * step))
            ):
                return Shortened(fewer, begin, end, more)
    return Shortened(micro_batches, 0, 0, 0)


def _later(some: tuple[Action, ...], by: int) -> tuple[Action, ...]:
    return tuple(action._replace(micro_batch=action.micro_batch + by) for action in some)


def _repeated(period: tuple[Action, ...], times: int, step: int) -> tuple[Action, ...]:
    return tuple(action for turn in range(times) for action in _later(period, turn * step))
