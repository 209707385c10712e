"""The engine of a pipeline: a rank plays its list of actions, and passes tensors on to its neighbours.

It knows nothing of schedules (trimaran.layout.schedule). PyTorch's schedules were weighed and not taken: they refuse
fewer micro-batches than stages, run the model a second time to infer shapes, and importing them costs every rank
0.8 s of start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.layout.schedule import Action, actions, feeds, forwards
from trimaran.nouns.stack import Schedule
from trimaran.train.comm.group import Group
from trimaran.train.engine.mailbox import Mailbox
from trimaran.train.engine.recorder import Recorder
from trimaran.train.model.autograd import Backward
from trimaran.train.model.gpt import Stage


class _InFlight(NamedTuple):
    """What a rank keeps of a micro-batch from the forward of a virtual stage to its backward: not what it gave."""

    x: Tensor
    backward: Backward


class PipelineEngine:
    """Runs the virtual stages of a rank through the actions of a schedule.

    `new_activation` makes a tensor as it passes between stages, (micro-batch, sequence, hidden). `on_action` is
    called after every action.
    """

    def __init__(
        self,
        stage: Stage,
        schedule: Schedule,
        rising: Group,
        falling: Group,
        new_activation: Callable[[], Tensor],
        on_action: Callable[[Action], None],
        recorder: Recorder,
    ) -> None:
        self._stage, self._schedule = stage, schedule
        self._index, self._ranks, self._stages = rising.index, rising.size, stage.virtual_stages
        self._mail = Mailbox(rising, falling, new_activation, ring=self._stages > self._ranks)
        self._on_action, self._recorder = on_action, recorder
        # the products of weight gradients that the last backward left out
        self._deferred: list[Callable[[], None]] = []
        if schedule == "zero_bubble":
            for weight in stage.weights():
                weight.deferred = self._deferred

    def run(self, tokens: Tensor, targets: Tensor, scale: float, documents: Tensor | None = None) -> Tensor:
        """Forward and backward of all micro-batches; gradients are added to the weights' main_grad.

        `tokens`, `targets` and, where attention is to stay within a document, `documents` are (micro-batches,
        micro-batch, sequence), the last of whole sequences. Returns the loss summed over this replica's micro-batches,
        on the last stage; zero elsewhere.
        """

        def actions_of(rank: int) -> Sequence[Action]:
            return actions(self._schedule, rank, self._ranks, self._stages, len(tokens))

        self._mail.expect(actions_of, self._stages)
        in_flight: dict[Action, _InFlight] = {}
        weight_gradients: dict[Action, list[Callable[[], None]]] = {}
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for action in actions_of(self._index):
            kind, i, stage = action
            forward = action._replace(kind="forward")
            if kind == "forward":
                x = tokens[i] if stage == 0 else self._receive(action).requires_grad_()
                y = self._stage(x, stage, None if documents is None else documents[i])
                if stage == self._stages - 1:
                    y = self._stage.loss(y, targets[i], scale)
                    total += y.detach()
                in_flight[action] = _InFlight(x, Backward(y))
                self._recorder.lap(kind, action)
                self._pass_on(y.detach(), action)
                del x, y  # the mailbox alone keeps what is on its way
            elif kind == "backward":
                self._backward(in_flight.pop(forward), action)
                if self._deferred:
                    weight_gradients[forward] = self._deferred.copy()
                    self._deferred.clear()
            else:
                with torch.no_grad():
                    for add in weight_gradients.pop(forward):
                        add()
                self._recorder.lap(kind, action)
            self._on_action(action)
        self._mail.flush()
        self._recorder.lap("wait")
        return total

    def _backward(self, of: _InFlight, action: Action) -> None:
        of.backward.run(None if action.stage == self._stages - 1 else self._receive(action))
        self._recorder.lap(action.kind, action)
        if of.x.grad is not None:  # tokens have none
            self._pass_on(of.x.grad, action)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor, scale: float, documents: Tensor | None = None) -> Tensor:
        """The loss that `run` returns, by forwards alone."""

        def actions_of(rank: int) -> Sequence[Action]:
            return forwards(rank, self._ranks, self._stages, len(tokens))

        self._mail.expect(actions_of, self._stages)
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for action in actions_of(self._index):
            _, i, stage = action
            x = tokens[i] if stage == 0 else self._mail.receive(action)
            y = self._stage(x, stage, None if documents is None else documents[i])
            consumer = feeds(action, self._stages)
            if consumer is None:
                total += self._stage.loss(y, targets[i], scale)
            else:
                self._mail.send(y, consumer)
            self._on_action(action)
        self._mail.flush()
        return total

    def _receive(self, action: Action) -> Tensor:
        x = self._mail.receive(action)
        self._recorder.lap("wait", action)
        return x

    def _pass_on(self, tensor: Tensor, action: Action) -> None:
        """Send what an action made to the rank whose action needs it, if one does."""
        consumer = feeds(action, self._stages)
        if consumer is not None:
            self._mail.send(tensor, consumer)
            self._recorder.lap("send", action)
