"""Pipeline schedules: who does which micro-batch when, and the engine that runs it.

A schedule is a list of actions per stage; the engine knows nothing of schedules. Torch's
native schedules were weighed and left: they refuse fewer micro-batches than stages, run the
model a second time to infer shapes, and importing them costs every rank 0.8 s of start-up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.layout import Schedule
from trimaran.train.gpt import Stage
from trimaran.train.mesh import Group


@dataclass(frozen=True)
class Action:
    """Forward or backward of one micro-batch."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965)."""
    forwards = [Action("forward", i) for i in range(micro_batches)]
    return forwards + [Action("backward", i) for i in range(micro_batches)]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Warm-up of `stages - stage - 1` forwards, then one forward, one backward; then the rest.

    PipeDream-Flush (Narayanan et al., arXiv 2104.04473, figure 4): as GPipe's, the bubble is
    (p - 1) / m, but at most `stages - stage` micro-batches are in flight.
    """
    warm_up = min(stages - stage - 1, micro_batches)
    actions = [Action("forward", i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        actions += [Action("forward", warm_up + i), Action("backward", i)]
    return actions + [Action("backward", i) for i in range(micro_batches - warm_up, micro_batches)]


def schedule_actions(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """The actions of one stage. Without a pipeline every micro-batch goes forward, then backward."""
    if schedule == "gpipe":
        return gpipe(stage, stages, micro_batches)
    return one_f_one_b(stage, stages, micro_batches)


class Mailbox:
    """Sends and receives one tensor shape between this stage and its two neighbours.

    Receives are posted one micro-batch ahead, so that a tensor has landed by the time it is
    needed; sends are left to finish by themselves. Each direction of a pair of ranks is its own
    first-in-first-out channel. On NCCL the two directions need communicators of their own, or a
    send waiting for its receive would block the other direction.
    """

    def __init__(self, forward: Group, backward: Group, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._groups = {"forward": forward, "backward": backward}
        self._shape, self._dtype = shape, dtype
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def inbox(self, kind: str, source: int, count: int, device: torch.device) -> Iterator[Tensor]:
        """The `count` tensors that stage `source` will send, in order, one being awaited at any time."""
        group = self._groups[kind]

        def post() -> tuple[dist.Work, Tensor]:
            tensor = torch.empty(self._shape, dtype=self._dtype, device=device)
            work = dist.irecv(tensor, group.ranks[source], group=group.handle)
            assert work is not None
            return work, tensor

        def receive() -> Iterator[Tensor]:
            work, tensor = first
            for remaining in range(count - 1, -1, -1):
                work.wait()
                received = tensor
                if remaining:
                    work, tensor = post()
                yield received

        if not count:
            return iter(())
        first = post()
        return receive()

    def send(self, kind: str, tensor: Tensor, target: int) -> None:
        """Begin to send to stage `target`; the tensor is kept until it has gone."""
        group = self._groups[kind]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group.ranks[target], group=group.handle)
        assert work is not None
        self._sends.append((work, tensor))
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()

    def flush(self) -> None:
        """Wait until everything sent has gone."""
        while self._sends:
            self._sends.popleft()[0].wait()


class Engine:
    """Runs one stage through the actions of a schedule.

    `shape` is that of the activations between stages, (micro-batch, sequence, hidden).
    `on_action` is called after every action, as a sign of life.
    """

    def __init__(
        self,
        stage: Stage,
        forward: Group,
        backward: Group,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        on_action: Callable[[Action], None],
    ) -> None:
        self._stage = stage
        self._index, self._stages = forward.index, forward.size
        self._mail = Mailbox(forward, backward, shape, dtype)
        self._on_action = on_action

    @property
    def _first(self) -> bool:
        return self._index == 0

    @property
    def _last(self) -> bool:
        return self._index == self._stages - 1

    def run(self, actions: Sequence[Action], tokens: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Forward and backward of all micro-batches; gradients are left in the weights' main_grad.

        `tokens` and `targets` are (micro-batches, micro-batch, sequence). Returns the loss summed
        over this replica's micro-batches, on the last stage; zero elsewhere.
        """
        device = tokens.device
        micro_batches = len(tokens)
        activations = self._mail.inbox("forward", self._index - 1, 0 if self._first else micro_batches, device)
        gradients = self._mail.inbox("backward", self._index + 1, 0 if self._last else micro_batches, device)
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        total = torch.zeros((), dtype=torch.float64, device=device)
        for action in actions:
            i = action.micro_batch
            if action.kind == "forward":
                inputs[i] = tokens[i] if self._first else next(activations).requires_grad_()
                y = self._stage(inputs[i])
                if self._last:
                    y = self._stage.loss(y, targets[i], scale)
                    total += y.detach()
                else:
                    self._mail.send("forward", y.detach(), self._index + 1)
                outputs[i] = y
            else:
                torch.autograd.backward(outputs.pop(i), None if self._last else next(gradients))
                x = inputs.pop(i)
                if not self._first:
                    assert x.grad is not None
                    self._mail.send("backward", x.grad, self._index - 1)
            self._on_action(action)
        self._mail.flush()
        return total
