"""Data parallelism: when replicas sum gradients, and where weights are before and after a step.

It is applied to a plain stage from outside, by hooks on its modules:

* all-reduce: gradients are summed over the replicas; each of them makes the whole step.
* parameter server: the first replica sums gradients, makes the step and sends the weights to the others.
* ZeRO 1 (Rajbhandari et al., arXiv 1910.02054): each replica receives the sum of its share of the gradients,
  makes the step for it, and the shares of the weights are gathered.
* ZeRO 2: so is each micro-batch's, unit by unit as the backward leaves it; whole gradients exist of two units only.
* ZeRO 3, fully sharded: so do whole weights, gathered as forward and backward come to a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.layout.layout import Layout
from trimaran.layout.schedule import Action
from trimaran.train.comm.exchange import Finish, done
from trimaran.train.comm.group import all_reduce_together
from trimaran.train.comm.mesh import Mesh
from trimaran.train.engine.flat_weights import FlatWeights, Unit, give_memory_back, take_memory
from trimaran.train.model.autograd import apply
from trimaran.train.model.gpt import Stage
from trimaran.train.model.vocabulary import Head


class _Mark(torch.autograd.Function):
    """Identity, whose backward calls `reached` as it passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reached: Callable[[], None]) -> Tensor:
        ctx.reached = reached
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.reached()
        return dy, None


@dataclass(frozen=True, eq=False)
class Home:
    """A module of the stage and the units that it computes with; `own` are those it finishes the gradients of.

    `number` orders modules that follow each other in a forward pass: that of a layer in the whole model, below 0
    of the embedding and its norm, and on from the last layer.
    """

    module: nn.Module
    number: int
    units: tuple[Unit, ...]
    own: tuple[Unit, ...]


def homes_of(stage: Stage, flat: FlatWeights) -> tuple[Home, ...]:
    """The modules whose weights travel together, in the order of the forward pass."""

    def units(prefix: str) -> tuple[Unit, ...]:
        return tuple(unit for unit in flat.units if unit.name == prefix or unit.name.startswith(prefix + "."))

    homes: list[Home] = []
    before_layers = -2 if stage.embedding_norm is not None else -1
    if stage.embedding is not None:
        # tokens have no gradient, so its backward has no end that a hook would see
        homes.append(Home(stage.embedding, before_layers, units("embedding"), ()))
    if stage.embedding_norm is not None:
        own = units("embedding_norm")
        homes.append(Home(stage.embedding_norm, -1, own, own))
    for number, layer in stage.layers.items():
        own = units(f"layers.{number}")
        homes.append(Home(layer, int(number), own, own))
    if stage.norm is not None and stage.head is not None:
        last = homes[-1].number
        norm, head = units("norm"), units("head")
        homes.append(Home(stage.norm, last + 1, norm, norm))
        # a tied head computes with the embedding's matrix, whose gradient the embedding finishes
        homes.append(Home(stage.head, last + 2, units("embedding.tokens") if stage.head.borrows else head, head))
    return tuple(homes)


class DataParallel:
    """One rank's part in its group of replicas. A trainer calls `begin`, `after` each action, `finish`; then,
    once the optimizer has made its step on what the rank owns, `publish`.
    """

    def __init__(self, stage: Stage, flat: FlatWeights, layout: Layout, mesh: Mesh, *, tied: bool) -> None:
        self._flat, self._group, self._tied = flat, mesh.dp, mesh.tied
        self._zero = flat.zero_stage
        self._served = layout.dp_kind == "parameter_server"
        self._homes = homes_of(stage, flat)
        self._tp = mesh.tp
        self._repeated = [place.span for place in flat.places.values() if place.spec.shard_dim is None]
        # two stages hold a tied embedding, and the same ranks of their replicas the same part of it
        matrices = ("embedding.tokens", "head.weight") if tied and mesh.tied.size > 1 else ()
        self._tied_units = [unit for unit in flat.units if unit.name in matrices and len(unit.own)]
        self._micro_batches = 0
        # units of which gradients are at work or on their way, and how often each was finished in this step
        self._open: list[Unit] = []
        self._summing: dict[str, Finish] = {}
        self._finished: dict[str, int] = {}
        # ZeRO 3: modules whose weights are whole, the latest last, and what is on its way
        self._whole: list[Home] = []
        self._gathering: dict[str, Finish] = {}
        self._sums_early = (
            self._zero < 2 and self._group.overlaps and not self._served and layout.schedule != "zero_bubble"
        )
        if self._zero >= 2 or self._sums_early:
            for home in self._homes:
                home.module.register_forward_pre_hook(partial(self._before_forward, home))
                home.module.register_forward_hook(partial(self._behind_forward, home))

    @property
    def share(self) -> float:
        """What part of a sum over all replicas a rank brings that counts what it owns."""
        return 1.0 if self._zero or self._served else 1.0 / self._group.size

    def begin(self, micro_batches: int) -> None:
        """A step of so many micro-batches begins."""
        self._micro_batches = micro_batches
        self._finished.clear()

    def after(self, action: Action) -> None:
        """An action is over, and with a backward all that a module did not see the end of."""
        if self._zero >= 2 and action.kind == "backward":
            for unit in self._open.copy():
                self._begin_shard_sum(unit)

    def finish(self) -> None:
        """Have the gradients that this rank owns be sums over all that share the weight."""
        if self._zero >= 2:
            for name in list(self._summing):
                self._finish_shard_sum(name)
        else:
            for unit in self._flat.units:
                if unit.name not in self._summing:
                    self._begin_sum(unit)
            for finish in self._summing.values():
                finish()
            self._summing.clear()
        if self._tp.slices_sequence:
            # each TP rank has seen its own slice of the sequence alone
            all_reduce_together(self._tp, self._flat.owned_parts(self._repeated, self._flat.grads))
        for unit in self._tied_units:
            self._tied.all_reduce(self._flat.owned_part(unit, self._flat.grads))

    def publish(self) -> None:
        """Let all weights follow the master weights, wherever they are owned."""
        if self._zero == 3:
            for home in self._whole:
                self._forget(home.units)
            self._whole.clear()
            return
        finishes = []
        for unit in self._flat.units:
            self._flat.refresh(unit)
            if self._served:
                self._group.broadcast_from_first(unit.weights)
            elif self._zero:
                finishes.append(self._begin_gather(unit))
        for finish in finishes:
            finish()

    # gradients

    def _begin_sum(self, unit: Unit) -> None:
        if self._served:
            self._group.reduce_to_first(unit.grads)
            return
        if self._zero:
            own = unit.grads[unit.own.slice_in(unit.span)]
            self._summing[unit.name] = self._group.begin_reduce_scatter(own, unit.grads)
        else:
            self._summing[unit.name] = self._group.begin_all_reduce(unit.grads)

    def _open_grads(self, unit: Unit) -> None:
        """Give a unit memory for the gradients of a micro-batch."""
        if unit in self._open:
            return
        if unit.name in self._summing:
            self._finish_shard_sum(unit.name)
        take_memory(unit.grads)
        unit.grads.zero_()
        self._open.append(unit)

    def _begin_shard_sum(self, unit: Unit) -> None:
        """Begin to add up a micro-batch's gradients over the replicas; at most one unit is on its way."""
        for name in list(self._summing):
            self._finish_shard_sum(name)
        self._open.remove(unit)
        own = unit.grads[unit.own.slice_in(unit.span)]
        self._summing[unit.name] = self._group.begin_reduce_scatter(own, unit.grads)
        if not self._group.overlaps:
            self._finish_shard_sum(unit.name)

    def _finish_shard_sum(self, name: str) -> None:
        self._summing.pop(name)()
        unit = self._flat.unit(name)
        self._flat.owned_part(unit, self._flat.grads).add_(unit.grads[unit.own.slice_in(unit.span)])
        give_memory_back(unit.grads)

    # weights

    def _begin_gather(self, unit: Unit) -> Finish:
        return self._group.begin_all_gather_into(unit.weights, unit.weights[unit.own.slice_in(unit.span)])

    def _make_whole(self, home: Home) -> None:
        """Gather a module's weights, and let go those of all others but the one before it."""
        others = [other for other in self._whole if other is not home][-1:]
        dropped = [other for other in self._whole if other is not home and other not in others]
        self._whole = [*others, home]
        for other in dropped:
            self._forget([unit for unit in other.units if not any(unit in kept.units for kept in self._whole)])
        for unit in home.units:
            if take_memory(unit.weights):
                self._flat.refresh(unit)
                self._gathering[unit.name] = self._begin_gather(unit)

    def _await(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self._gathering.pop(unit.name, done)()

    def _forget(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self._await([unit])
            give_memory_back(unit.weights)

    def _enter(self, home: Home, then: int) -> None:
        """Have a module's weights, and begin to gather those of the next one: `then` modules further."""
        self._make_whole(home)
        self._await(home.units)
        at = self._homes.index(home) + then
        if self._group.overlaps and 0 <= at < len(self._homes) and self._homes[at].number == home.number + then:
            self._make_whole(self._homes[at])

    # hooks

    def _before_forward(self, home: Home, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._zero == 3:
            self._enter(home, 1)
        x = arguments[0]
        if not torch.is_grad_enabled():
            return arguments
        if self._zero >= 2 and isinstance(module, Head):
            # the loss makes the gradient of its matrix along with itself
            for unit in home.units:
                self._open_grads(unit)
        if not x.requires_grad:
            return arguments
        return (apply(_Mark, x, partial(self._behind_backward, home)), *arguments[1:])

    def _behind_forward(self, home: Home, module: nn.Module, arguments: tuple[Any, ...], y: Tensor) -> Tensor:
        if isinstance(module, Head) or not (torch.is_grad_enabled() and y.requires_grad):
            return y
        return apply(_Mark, y, partial(self._before_backward, home))

    def _before_backward(self, home: Home) -> None:
        if self._zero == 3 and home.own:
            self._enter(home, -1)
        if self._zero >= 2:
            for unit in home.units:
                self._open_grads(unit)

    def _behind_backward(self, home: Home) -> None:
        for unit in home.own:
            if self._zero >= 2:
                # the head's gradients are made with the loss: where GPipe has seen all losses, they left with the
                # first micro-batch that goes back
                if unit in self._open:
                    self._begin_shard_sum(unit)
                continue
            self._finished[unit.name] = self._finished.get(unit.name, 0) + 1
            if self._finished[unit.name] == self._micro_batches:
                self._begin_sum(unit)
