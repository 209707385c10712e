"""Pipeline schedules: what each rank does when, as a list of actions.

The simulator and the trainer play the same lists. The schedules are GPipe (Huang et al., arXiv 1811.06965), 1F1B
(Narayanan et al., arXiv 1806.03377), interleaved 1F1B (arXiv 2104.04473) and zero-bubble ZB-H1 (Qi et al.,
arXiv 2401.10241). Virtual stage s lies on rank s % ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from trimaran.nouns.stack import Schedule
from trimaran.nouns.timeline import EventKind


class Action(NamedTuple):
    """One thing a rank does: `kind` on micro-batch `micro_batch` in virtual stage `stage`."""

    kind: EventKind
    micro_batch: int
    stage: int


def feeds(action: Action, stages: int) -> Action | None:
    """The action of another stage that needs what `action` makes; None where nothing is passed on."""
    step = {"forward": 1, "backward": -1}.get(action.kind)
    if step is None or not 0 <= action.stage + step < stages:
        return None
    return action._replace(stage=action.stage + step)


@cache
def actions(schedule: Schedule, rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """What `rank` does, in order. Without a pipeline every micro-batch goes forward, then backward."""
    if schedule == "gpipe":
        order = range(micro_batches)
        return (
            *(Action("forward", m, rank) for m in order),
            *(Action("backward", m, rank) for m in order),
        )
    if schedule == "interleaved":
        return _interleaved(rank, ranks, stages // ranks, micro_batches)
    one_by_one = _one_f_one_b(rank, ranks, micro_batches)
    return _zero_bubble(one_by_one, rank) if schedule == "zero_bubble" else one_by_one


@cache
def forwards(rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """What `rank` does where nothing goes back: its virtual stages one after the other, each with all micro-batches."""
    return tuple(Action("forward", m, stage) for stage in range(rank, stages, ranks) for m in range(micro_batches))


def _one_f_one_b(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that are left.

    As GPipe's, the bubble is (p - 1) / m, but at most `ranks - rank` micro-batches are in flight.
    """
    warm_up = min(ranks - rank - 1, micro_batches)
    out = [Action("forward", m, rank) for m in range(warm_up)]
    for m in range(micro_batches - warm_up):
        out += [Action("forward", warm_up + m, rank), Action("backward", m, rank)]
    out += [Action("backward", m, rank) for m in range(micro_batches - warm_up, micro_batches)]
    return tuple(out)


def _zero_bubble(plain: Sequence[Action], rank: int) -> tuple[Action, ...]:
    """ZB-H1: weight gradients are put off by as many micro-batches as the rank lies from the first.

    The drain's waits are then filled with them, and no more activations are kept than under 1F1B.
    """
    out: list[Action] = []
    waiting: deque[int] = deque()
    for action in plain:
        out.append(action)
        if action.kind == "backward":
            waiting.append(action.micro_batch)
            if len(waiting) > rank:
                out.append(Action("backward_weight", waiting.popleft(), rank))
    out += [Action("backward_weight", m, rank) for m in waiting]
    return tuple(out)


def _interleaved(rank: int, ranks: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """Megatron-LM's order: ranks' worth of micro-batches through each chunk in turn."""
    total = micro_batches * chunks
    warm_up = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)

    def at(position: int, kind: EventKind) -> Action:
        group, within = divmod(position, ranks * chunks)
        chunk = within // ranks
        chunk = chunk if kind == "forward" else chunks - 1 - chunk
        return Action(kind, group * ranks + within % ranks, chunk * ranks + rank)

    out = [at(i, "forward") for i in range(warm_up)]
    for i in range(total - warm_up):
        out += [at(warm_up + i, "forward"), at(i, "backward")]
    out += [at(i, "backward") for i in range(total - warm_up, total)]
    return tuple(out)
