"""Pipeline schedules: what each rank does when, as a list of actions.

The simulator and the trainer play the same lists. The schedules are GPipe (Huang et al., arXiv 1811.06965), 1F1B
(Narayanan et al., arXiv 1806.03377), interleaved 1F1B (arXiv 2104.04473), zero-bubble ZB-H1 (Qi et al.,
arXiv 2401.10241), ZB-V (section 6 there; Qi et al., arXiv 2405.15362) and DualPipeV (the V of DeepSeek-V3's DualPipe,
arXiv 2412.19437, section 3.2.1). The last two are in PyTorch's order (torch 2.13.0, torch/distributed/pipelining/
schedules.py, lines 3268 and 3459).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from trimaran.nouns.stack import FOLDED, Schedule
from trimaran.nouns.timeline import EventKind


@dataclass(frozen=True)
class Needs:
    """What a schedule needs: so many `chunks` of layers on a rank (0: two or more), and so many micro-batches.

    Micro-batches go `in_turns` of as many as there are ranks, and are `each` a rank at least.
    """

    chunks: int = 1
    in_turns: bool = False
    each: int = 0

    def turn(self, ranks: int) -> int:
        """The number of which micro-batches have to be a multiple."""
        return ranks if self.in_turns else 1

    def least(self, ranks: int) -> int:
        """The fewest micro-batches."""
        return max(self.turn(ranks), self.each * ranks)


NEEDS: Mapping[Schedule, Needs] = {
    "none": Needs(),
    "gpipe": Needs(),
    "1f1b": Needs(),
    "interleaved": Needs(chunks=0, in_turns=True),
    "zero_bubble": Needs(each=1),
    "zbv": Needs(chunks=2),
    "dualpipev": Needs(chunks=2, each=2),  # torch 2.13.0, torch/distributed/pipelining/schedules.py, line 3439
}


class Action(NamedTuple):
    """One thing a rank does: `kind` on micro-batch `micro_batch` in virtual stage `stage`.

    A `backward` makes weight gradients too, but under zero-bubble (ZB-H1), which has `backward_weight` for them. Folded
    schedules have both kinds of backward, and `backward_input` is the one without.
    """

    kind: EventKind
    micro_batch: int
    stage: int


def feeds(action: Action, stages: int) -> Action | None:
    """The action of another stage that needs what `action` makes; None where nothing is passed on."""
    step = {"forward": 1, "backward": -1, "backward_input": -1}.get(action.kind)
    if step is None or not 0 <= action.stage + step < stages:
        return None
    return action._replace(stage=action.stage + step)


def rank_of(schedule: Schedule, stage: int, ranks: int) -> int:
    """The rank that holds a virtual stage: they are dealt out in turn, or folded, down the ranks and up again."""
    return min(stage, 2 * ranks - 1 - stage) if schedule in FOLDED else stage % ranks


@cache
def actions(
    schedule: Schedule, rank: int, ranks: int, stages: int, micro_batches: int, *, eager: bool = False
) -> tuple[Action, ...]:
    """What `rank` does, in order. Without a pipeline every micro-batch goes forward, then backward.

    `eager`: 1F1B goes ahead by two forwards for each rank behind, so that sends hide behind work (Eager-1F1B, Zhuang et
    al., arXiv 2211.05322, section 4.2).
    """
    if schedule == "gpipe":
        sweep = range(micro_batches)
        return (
            *(Action("forward", m, rank) for m in sweep),
            *(Action("backward", m, rank) for m in sweep),
        )
    if schedule == "interleaved":
        return _interleaved(rank, ranks, stages // ranks, micro_batches)
    if schedule in FOLDED:
        order = _zbv(rank, ranks, micro_batches) if schedule == "zbv" else _dualpipev(rank, ranks, micro_batches)
        return tuple(action for action in order if action.micro_batch < micro_batches)
    one_by_one = _one_f_one_b(rank, ranks, micro_batches, ahead=2 if eager and schedule == "1f1b" else 1)
    return _zero_bubble(one_by_one, rank) if schedule == "zero_bubble" else one_by_one


@cache
def forwards(rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """What `rank` does where nothing goes back: its virtual stages one after the other, each with all micro-batches."""
    return tuple(Action("forward", m, stage) for stage in range(rank, stages, ranks) for m in range(micro_batches))


def _one_f_one_b(rank: int, ranks: int, micro_batches: int, *, ahead: int) -> tuple[Action, ...]:
    """Warm-up forwards, `ahead` for each rank behind, then one forward and one backward in turn, then what is left.

    As GPipe's, the bubble is (p - 1) / m, but one micro-batch more than the warm-up's at most is in flight.
    """
    warm_up = min(ahead * (ranks - rank - 1), micro_batches)
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


class _Folded:
    """What a rank with two chunks, on the way down (0) and up (1), has done: of each kind micro-batches in turn."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stages = rank, 2 * ranks - 1 - rank
        self.done: list[Action] = []
        self.count: Counter[tuple[EventKind, int]] = Counter()
        self.put_off: deque[int] = deque()

    def forward(self, chunk: int) -> None:
        self._do("forward", chunk)

    def backward(self, chunk: int, *, whole: bool = True) -> None:
        """A backward, or without weight gradients, which are then put off."""
        if whole:
            self._do("backward", chunk)
            return
        self.put_off.append(chunk)
        self._do("backward_input", chunk)

    def weight(self, chunk: int) -> None:
        self._do("backward_weight", chunk)

    def oldest_weight(self) -> None:
        """The weight gradients that are put off longest, if any are."""
        if self.put_off:
            self.weight(self.put_off.popleft())

    def _do(self, kind: EventKind, chunk: int) -> None:
        backward = "backward" if kind == "backward_input" else kind
        if kind == "backward":
            self.count["backward_weight", chunk] += 1
        self.done.append(Action(kind, self.count[backward, chunk], self.stages[chunk]))
        self.count[backward, chunk] += 1


def _zbv(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """ZB-V where forward, backward and weight gradients take as long: no more in flight than on 1F1B's first rank.

    It is made for 2 ranks - 1 micro-batches or more; of fewer it leaves out what the others would do.
    """
    run = _Folded(rank, ranks)
    whole = max(2 * ranks - 1, micro_batches)

    def back(chunk: int) -> None:
        run.backward(chunk, whole=False)
        run.weight(chunk)

    for _ in range(2 * (ranks - rank) - 1):
        run.forward(0)
    for _ in range(rank):
        run.forward(1)
        run.forward(0)
    for _ in range(ranks - rank):
        run.forward(1)
        back(1)
    while run.count["forward", 1] < whole:
        if run.count["forward", 0] < whole:
            run.forward(0)
        back(0)
        run.forward(1)
        back(1)
    for _ in range(rank):
        run.backward(0, whole=False)
        run.backward(1, whole=False)
    for _ in range(ranks - rank):
        back(0)
    for chunk in (1, 0):
        while run.count["backward_weight", chunk] < whole:
            run.weight(chunk)
    return run.done


def _dualpipev(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """DualPipeV: in its middle each forward is beside a backward of the other chunk, here one behind the other.

    It is made for as many micro-batches as there are stages, or more. PyTorch refuses fewer; here of fewer is left out
    what the others would do.
    """
    run = _Folded(rank, ranks)
    whole = max(2 * ranks, micro_batches)
    behind = ranks - rank - 1
    for _ in range(2 * behind):
        run.forward(0)
    for _ in range(rank + 1):
        run.forward(0)
        run.forward(1)
    for _ in range(behind):
        run.backward(1, whole=False)
        run.oldest_weight()
        run.forward(1)
    for _ in range(whole - 2 * ranks + rank + 1):
        run.forward(0)
        run.backward(1)
        run.forward(1)
        run.backward(0)
    for _ in range(behind):
        run.backward(1)
        run.forward(1)
        run.backward(0)
    # Of the last rank + 1 backwards of either chunk the second half leaves weight gradients for the drain.
    for turn in range(2 * (rank + 1)):
        run.backward(1 - turn % 2, whole=turn < rank + 1)
    for _ in range(behind):
        run.oldest_weight()
        run.backward(0, whole=False)
    for _ in range(rank + 1):
        run.oldest_weight()
    return run.done
