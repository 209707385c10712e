"""Mailbox: the tensors that pass between a rank of a pipeline and its neighbours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.layout.schedule import Action, feeds
from trimaran.train.comm.group import Group


class Inbox:
    """Tensors from a neighbour, in the order in which it sends them.

    A receive is always posted, so that a tensor has arrived by the time it is needed. A tensor that comes before its
    turn, as happens where several virtual stages share a pair of ranks, waits here.
    """

    def __init__(self, source: int, group: Group, new_tensor: Callable[[], Tensor]) -> None:
        self._source, self._group, self._new_tensor = source, group, new_tensor
        self._expected: deque[Action] = deque()
        self._arrived: dict[Action, Tensor] = {}
        self._posted: tuple[dist.Work, Tensor] | None = None

    def expect(self, needed_by: list[Action]) -> None:
        """Announce what comes next: a tensor for each of these actions."""
        self._expected.extend(needed_by)
        self._post()

    def _post(self) -> None:
        if self._posted is None and self._expected:
            tensor = self._new_tensor()
            work = dist.irecv(tensor, self._group.ranks[self._source], group=self._group.handle)
            assert work is not None
            self._posted = work, tensor

    def take(self, action: Action) -> Tensor:
        """Wait for the tensor that `action` needs."""
        while action not in self._arrived:
            assert self._posted is not None, f"no tensor is expected for {action}"
            work, tensor = self._posted
            with self._group.clock.waiting():
                work.wait()
            self._arrived[self._expected.popleft()] = tensor
            self._posted = None
            self._post()
        return self._arrived.pop(action)


class Mailbox:
    """Sends and receives tensors as `new_tensor` makes them between this rank and its neighbours in the pipeline.

    Each ordered pair of ranks is a first-in-first-out channel, on which the receiver posts its receives in the order
    in which the sender sends, so that neither can wait for the other in a circle. On NCCL the two directions of a
    pair need different communicators, or a send that waits for its receive would block the other direction: `rising`
    carries what goes to a higher rank of the pipeline, `falling` what goes to a lower rank. `ring` says that the last
    rank sends to the first.
    """

    def __init__(self, rising: Group, falling: Group, new_tensor: Callable[[], Tensor], *, ring: bool) -> None:
        self._index, self._ranks = rising.index, rising.size
        self._rising, self._falling = rising, falling
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        neighbours = {(self._index + step) % self._ranks for step in (-1, 1)} - {self._index}
        self._inboxes = {
            source: Inbox(source, rising if source < self._index else falling, new_tensor) for source in neighbours
        }
        self._connect(ring, torch.zeros(1, device=new_tensor().device))

    def _connect(self, ring: bool, token: Tensor) -> None:
        """Pass a token between all neighbours, pair by pair in the same order on every rank.

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
        """Read from the neighbours' lists of actions what they will send here."""
        for source, inbox in self._inboxes.items():
            consumers = (feeds(action, stages) for action in actions_of(source))
            inbox.expect([c for c in consumers if c is not None and c.stage % self._ranks == self._index])

    def receive(self, action: Action) -> Tensor:
        """What `action` needs from the stage before it, or in a backward from the stage after it."""
        source = action.stage + (-1 if action.kind == "forward" else 1)
        return self._inboxes[source % self._ranks].take(action)

    def send(self, tensor: Tensor, consumer: Action) -> None:
        """Begin to send the tensor to the rank of the action that needs it; it is kept until it is sent."""
        target = consumer.stage % self._ranks
        group = self._rising if target > self._index else self._falling
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group.ranks[target], group=group.handle)
        assert work is not None
        self._sends.append((work, tensor))
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()

    def flush(self) -> None:
        """Wait until everything is sent."""
        with self._rising.clock.waiting():
            while self._sends:
                self._sends.popleft()[0].wait()
