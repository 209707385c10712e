"""The engine of a pipeline: one rank plays its list of actions, and passes tensors on to its neighbours.

It knows nothing of schedules (trimaran.layout.schedule). Torch's native ones were weighed and left: they refuse fewer
micro-batches than stages, run the model a second time to infer shapes, and importing them costs every rank 0.8 s
of start-up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.layout.schedule import Action, actions, feeds, forwards
from trimaran.nouns.stack import Schedule
from trimaran.train.comm.group import Group
from trimaran.train.engine.recorder import Recorder
from trimaran.train.model.autograd import backward
from trimaran.train.model.gpt import Stage


class Inbox:
    """Tensors that one rank sends to this one, in the order in which it sends them.

    One receive is posted at any time, so that a tensor has landed by the time it is needed. A tensor that comes
    before its turn, as happens where several chunks share a pair of ranks, waits here.
    """

    def __init__(self, source: int, group: Group, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self._source, self._group = source, group
        self._shape, self._dtype, self._device = shape, dtype, device
        self._expected: deque[Action] = deque()
        self._landed: dict[Action, Tensor] = {}
        self._posted: tuple[dist.Work, Tensor] | None = None

    def expect(self, needed_by: list[Action]) -> None:
        """Announce what comes next: one tensor for each of these actions."""
        self._expected.extend(needed_by)
        self._post()

    def _post(self) -> None:
        if self._posted is None and self._expected:
            tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            work = dist.irecv(tensor, self._group.ranks[self._source], group=self._group.handle)
            assert work is not None
            self._posted = work, tensor

    def take(self, action: Action) -> Tensor:
        """What `action` needs, awaited."""
        while action not in self._landed:
            assert self._posted is not None, f"nothing is on its way for {action}"
            work, tensor = self._posted
            work.wait()
            self._landed[self._expected.popleft()] = tensor
            self._posted = None
            self._post()
        return self._landed.pop(action)


class Mailbox:
    """Sends and receives tensors of one shape between this rank and its neighbours in the pipeline.

    Each ordered pair of ranks is one first-in-first-out channel, on which the receiver posts its receives in the
    order in which the sender sends, so that neither can wait for the other in a circle. On NCCL the two directions
    of a pair need communicators of their own, or a send waiting for its receive would block the other direction:
    `rising` carries what goes to a higher rank of the pipeline, `falling` what goes to a lower one. `ring` says that
    the last rank sends to the first.
    """

    def __init__(
        self,
        rising: Group,
        falling: Group,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        ring: bool,
    ) -> None:
        self._index, self._ranks = rising.index, rising.size
        self._rising, self._falling = rising, falling
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        neighbours = {(self._index + step) % self._ranks for step in (-1, 1)} - {self._index}
        self._inboxes = {
            source: Inbox(source, rising if source < self._index else falling, shape, dtype, device)
            for source in neighbours
        }
        self._connect(ring, torch.zeros(1, device=device))

    def _connect(self, ring: bool, token: Tensor) -> None:
        """Pass a token between all neighbours, pair by pair in one order.

        NCCL makes the communicator of two ranks when they first send, and both wait for each other there: a receive
        that is posted early would be waited for by a rank that the sender itself waits for. (With a `device_id` it
        makes all of them at once, but then runs the sends of a group one after another.)
        """
        pairs = [(rank, rank + 1) for rank in range(self._ranks - 1)]
        if ring and self._ranks > 2:
            pairs.append((0, self._ranks - 1))
        for group in (self._rising, self._falling):
            for low, high in pairs:
                if self._index == low:
                    dist.send(token, group.ranks[high], group=group.handle)
                elif self._index == high:
                    dist.recv(token, group.ranks[low], group=group.handle)

    def expect(self, actions_of: Callable[[int], Sequence[Action]], stages: int) -> None:
        """Read from the neighbours' own lists of actions what they will send here."""
        for source, inbox in self._inboxes.items():
            sent = (feeds(action, stages) for action in actions_of(source))
            inbox.expect([fed for fed in sent if fed is not None and fed.stage % self._ranks == self._index])

    def receive(self, action: Action) -> Tensor:
        """What `action` needs from the stage before it, or under a backward from the stage after it."""
        source = action.stage + (-1 if action.kind == "forward" else 1)
        return self._inboxes[source % self._ranks].take(action)

    def send(self, tensor: Tensor, fed: Action) -> None:
        """Begin to send what `fed` needs to the rank of its stage; the tensor is kept until it has gone."""
        target = fed.stage % self._ranks
        group = self._rising if target > self._index else self._falling
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
    """Runs the virtual stages of one rank through the actions of a schedule.

    `shape` is that of the activations between stages, (micro-batch, sequence, hidden).
    `on_action` is called after every action, as a sign of life.
    """

    def __init__(
        self,
        stage: Stage,
        schedule: Schedule,
        rising: Group,
        falling: Group,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        on_action: Callable[[Action], None],
        recorder: Recorder,
    ) -> None:
        self._stage, self._schedule = stage, schedule
        self._index, self._ranks, self._stages = rising.index, rising.size, stage.virtual_stages
        self._mail = Mailbox(rising, falling, shape, dtype, device, ring=self._stages > self._ranks)
        self._on_action, self._recorder = on_action, recorder
        # weight gradients that the backward at hand has put off
        self._deferred: list[Callable[[], None]] = []
        if schedule == "zero_bubble":
            for weight in stage.weights():
                weight.deferred = self._deferred

    def run(self, tokens: Tensor, targets: Tensor, scale: float, documents: Tensor | None = None) -> Tensor:
        """Forward and backward of all micro-batches; gradients are left in the weights' main_grad.

        `tokens`, `targets` and, where attention is to stay within them, `documents` are (micro-batches,
        micro-batch, sequence). Returns the loss summed over this replica's micro-batches, on the last stage;
        zero elsewhere.
        """
        last = self._stages - 1

        def actions_of(rank: int) -> Sequence[Action]:
            return actions(self._schedule, rank, self._ranks, self._stages, len(tokens))

        self._mail.expect(actions_of, self._stages)
        inputs: dict[Action, Tensor] = {}
        outputs: dict[Action, Tensor] = {}
        waiting: dict[Action, list[Callable[[], None]]] = {}
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for action in actions_of(self._index):
            kind, i, stage = action
            fed = feeds(action, self._stages)
            forward = action._replace(kind="forward")
            if kind == "forward":
                x = tokens[i] if stage == 0 else self._received(action).requires_grad_()
                y = self._stage(x, stage, None if documents is None else documents[i])
                if fed is None:
                    y = self._stage.loss(y, targets[i], scale)
                    total += y.detach()
                self._recorder.lap(kind, action)
                if fed is not None:
                    self._sent(y.detach(), fed, action)
                inputs[action], outputs[action] = x, y
            elif kind == "backward":
                dy = None if stage == last else self._received(action)
                backward(outputs.pop(forward), dy)
                x = inputs.pop(forward)
                self._recorder.lap(kind, action)
                if fed is not None:
                    assert x.grad is not None
                    self._sent(x.grad, fed, action)
                if self._deferred:
                    waiting[forward] = self._deferred.copy()
                    self._deferred.clear()
            else:
                with torch.no_grad():
                    for add in waiting.pop(forward):
                        add()
                self._recorder.lap(kind, action)
            self._on_action(action)
        self._mail.flush()
        self._recorder.lap("wait")
        return total

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor, scale: float, documents: Tensor | None = None) -> Tensor:
        """The loss as `run` gives it, forward alone; no gradient is touched."""

        def actions_of(rank: int) -> Sequence[Action]:
            return forwards(rank, self._ranks, self._stages, len(tokens))

        self._mail.expect(actions_of, self._stages)
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for action in actions_of(self._index):
            _, i, stage = action
            x = tokens[i] if stage == 0 else self._mail.receive(action)
            y = self._stage(x, stage, None if documents is None else documents[i])
            fed = feeds(action, self._stages)
            if fed is None:
                total += self._stage.loss(y, targets[i], scale)
            else:
                self._mail.send(y, fed)
            self._on_action(action)
        self._mail.flush()
        return total

    def _received(self, action: Action) -> Tensor:
        x = self._mail.receive(action)
        self._recorder.lap("wait", action)
        return x

    def _sent(self, tensor: Tensor, fed: Action, action: Action) -> None:
        self._mail.send(tensor, fed)
        self._recorder.lap("send", action)
