"""Data parallelism: when replicas sum gradients, and where weights are before and after a step.

It is applied to a plain stage from outside, by hooks on its modules:

* all-reduce: gradients are summed over the replicas, and each replica makes the whole optimizer step.
* parameter server: the first replica sums gradients, makes the step and sends the weights to the others.
* ZeRO 1 (Rajbhandari et al., arXiv 1910.02054): each replica receives the sum of its shard of the gradients
  (reduce-scatter), makes the step for it, and the shards of the weights are gathered (all-gather).
* ZeRO 2: gradients are summed per micro-batch, unit by unit as the backward leaves it, so that whole gradients exist
  of two units at most.
* ZeRO 3, fully sharded: whole weights too exist of two units at most, gathered as forward and backward reach a unit.

Under hybrid sharding parts of the replicas shard so among themselves, and copies of a shard are summed besides. Every
unit knows the ranks that hold it (`Holders`). Copies are summed as `copy_sums` says; where replicas train apart
(`outer_optimizer`), they are not.
"""

from __future__ import annotations

from collections import Counter
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
from trimaran.train.engine.copy_sums import CopySums, NoSums
from trimaran.train.engine.flat_weights import FlatWeights, Unit
from trimaran.train.engine.units import Span
from trimaran.train.model.autograd import apply
from trimaran.train.model.gpt import Stage
from trimaran.train.model.vocabulary import Head


class _OnBackward(torch.autograd.Function):
    """Identity, whose backward calls `hook`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hook: Callable[[], None]) -> Tensor:
        ctx.hook = hook
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.hook()
        return dy, None


@dataclass(frozen=True, eq=False)
class Block:
    """A module of the stage and the units that it computes with; `finished` are those whose gradients it completes.

    `number` orders the blocks of a forward pass: a layer has its number in the whole model, the embedding and its
    norm have numbers below 0, and the final norm and the head have those after the last layer.
    """

    module: nn.Module
    number: int
    units: tuple[Unit, ...]
    finished: tuple[Unit, ...]


def blocks_of(stage: Stage, flat: FlatWeights) -> tuple[Block, ...]:
    """The blocks of the stage, in the order of the forward pass."""

    def units(prefix: str) -> tuple[Unit, ...]:
        return tuple(unit for unit in flat.units if unit.name == prefix or unit.name.startswith(prefix + "."))

    def block(module: nn.Module, number: int, prefix: str) -> Block:
        return Block(module, number, units(prefix), units(prefix))

    blocks: list[Block] = []
    if stage.embedding is not None:
        # tokens have no gradient, so that no hook sees the end of this backward
        first = -2 if stage.embedding_norm is not None else -1
        blocks.append(Block(stage.embedding, first, units("embedding"), ()))
    if stage.embedding_norm is not None:
        blocks.append(block(stage.embedding_norm, -1, "embedding_norm"))
    blocks += [block(layer, int(number), f"layers.{number}") for number, layer in stage.layers.items()]
    if stage.norm is not None and stage.head is not None:
        last = blocks[-1].number
        blocks.append(block(stage.norm, last + 1, "norm"))
        # a tied head computes with the embedding's matrix, whose gradient the embedding completes
        head = units("head")
        blocks.append(Block(stage.head, last + 2, units("embedding.tokens") if stage.head.borrows else head, head))
    return tuple(blocks)


class DataParallel:
    """This rank's part among the ranks that hold the same weights.

    In every step a trainer calls `begin`, `after` each action, and `finish`; then, once the optimizer has updated
    the master weights that the rank owns, `publish`.
    """

    def __init__(
        self, stage: Stage, flat: FlatWeights, layout: Layout, mesh: Mesh, sums: CopySums, *, tied: bool
    ) -> None:
        self._sums = NoSums() if layout.local_steps else sums
        self._flat, self._tied, self._zero_stage = flat, mesh.tied, flat.zero_stage
        self._blocks = blocks_of(stage, flat)
        self._tp = mesh.tp
        # weights of which each TP rank has seen a part of the gradient: that of its slice of the sequence, or features
        uncut = [place for place in flat.places.values() if place.spec.shard_dim is None]
        self._in_parts = [p.span for p in uncut if mesh.tp.slices_sequence or p.spec.summed_over_tp]
        # the first and the last stage hold a tied embedding, and the same replica owns the same part of it on both
        matrices = ("embedding.tokens", "head.weight") if tied and mesh.tied.size > 1 else ()
        self._tied_units = [unit for unit in flat.units if unit.name in matrices and len(unit.owned)]
        # What is not sent of a gradient has to be the same on all ranks that hold the weight, as a checkpoint has it
        # once: sums that keep something back are of whole gradients, and come behind those over TP and of tied units.
        self._sums_come_last = bool(self._sums.state)
        self._micro_batches = 0
        # ZeRO 2: units whose whole gradients have memory and are added to
        self._accumulating: list[Unit] = []
        # what finishes the sum of a unit's gradients over those that share it out, and then over copies of the shards;
        # and how many micro-batches have added to them
        self._scattering: dict[Unit, Finish] = {}
        self._summing: dict[Unit, Finish] = {}
        self._added: Counter[Unit] = Counter()
        # ZeRO 3: blocks whose weights are gathered, the latest last, and what finishes a gather that was begun
        self._gathered: list[Block] = []
        self._gathering: dict[Unit, Finish] = {}
        overlaps = any(unit.holders.overlaps and not unit.holders.serves for unit in flat.units)
        if self._zero_stage >= 2 or (overlaps and layout.schedule != "zero_bubble"):
            for block in self._blocks:
                block.module.register_forward_pre_hook(partial(self._before_forward, block))
                block.module.register_forward_hook(partial(self._after_forward, block))

    def begin(self, micro_batches: int) -> None:
        """A step of so many micro-batches begins."""
        self._micro_batches = micro_batches
        self._added.clear()

    def after(self, action: Action) -> None:
        """An action is over: after a backward, sum the gradients of blocks whose end no hook has seen."""
        if self._zero_stage >= 2 and action.kind == "backward":
            for unit in self._accumulating.copy():
                self._begin_sum(unit)

    def finish(self) -> None:
        """Complete the gradients that this rank owns: sums over all ranks that hold the weight."""
        if self._zero_stage < 2:
            for unit in self._flat.units:
                if unit not in self._scattering and unit not in self._summing:
                    self._begin_sum(unit)
        self._finish_scattering()
        if self._sums_come_last:
            self._sum_tied()
        for unit in self._flat.units:
            if unit not in self._summing:
                self._begin_sum_of_copies(unit)
        for finish in self._summing.values():
            finish()
        self._summing.clear()
        if not self._sums_come_last:
            self._sum_over_tp(self._in_parts)
            self._sum_tied()

    def publish(self) -> None:
        """Have all weights that are computed with follow the master weights, whichever rank owns these."""
        if self._zero_stage == 3:
            for block in self._gathered:
                self._free(block.units)
            self._gathered.clear()
            return
        finishes = []
        for unit in self._flat.units:
            self._flat.refresh(unit)
            if unit.holders.serves:
                unit.holders.copies.broadcast_from_first(unit.weights)
            else:
                finishes.append(self._begin_gather(unit))
        for finish in finishes:
            finish()

    # gradients

    def _allocate_grads(self, unit: Unit) -> None:
        """Give a unit memory for the gradients of a micro-batch."""
        if unit in self._accumulating:
            return
        if self._flat.grads_memory.holder(unit.grads) is not None:
            self._finish_scattering()
        self._flat.grads_memory.take(unit.grads)
        unit.grads.zero_()
        self._accumulating.append(unit)

    def _begin_sum(self, unit: Unit) -> None:
        """Begin to sum a unit's gradients: over its sharers, and where that is over at once, over its copies.

        Where something waits for the sum over the sharers, a single unit's goes on at a time.
        """
        holders = unit.holders
        if self._zero_stage >= 2:
            self._accumulating.remove(unit)
            self._added[unit] += 1
        if self._zero_stage >= 2 or holders.copies.size > 1:
            self._finish_scattering()
        finish = done
        if holders.sharers.size > 1:
            finish = holders.sharers.begin_reduce_scatter(unit.owned_part(unit.grads), unit.grads)
        self._scattering[unit] = finish
        if not holders.sharers.overlaps:
            self._finish_scattering()

    def _finish_scattering(self) -> None:
        """Finish the sums over sharers; copies begin to sum what no further micro-batch adds to."""
        for unit in list(self._scattering):
            self._scattering.pop(unit)()
            if self._zero_stage >= 2:
                self._flat.owned_part(unit, self._flat.grads).add_(unit.owned_part(unit.grads))
                self._flat.grads_memory.give_back(unit.grads)
            is_whole = self._zero_stage < 2 or self._added[unit] == self._micro_batches
            if is_whole and not (self._sums_come_last and unit in self._tied_units):
                self._begin_sum_of_copies(unit)

    def _sum_over_tp(self, spans: Iterable[Span]) -> None:
        all_reduce_together(self._tp, self._flat.owned_parts(list(spans), self._flat.grads))

    def _sum_tied(self) -> None:
        for unit in self._tied_units:
            self._tied.all_reduce(self._flat.owned_part(unit, self._flat.grads))

    def _begin_sum_of_copies(self, unit: Unit) -> None:
        copies = unit.holders.copies
        if self._sums_come_last:
            self._sum_over_tp(span.within(unit.span) for span in self._in_parts)
        if unit.holders.serves:
            copies.reduce_to_first(unit.grads)
            self._summing[unit] = done
        else:
            self._summing[unit] = self._sums.begin(unit, self._flat.owned_part(unit, self._flat.grads))

    # weights

    def _begin_gather(self, unit: Unit) -> Finish:
        return unit.holders.sharers.begin_all_gather_into(unit.weights, unit.owned_part(unit.weights))

    def _gather(self, block: Block) -> None:
        """Begin to gather a block's weights, and free those of all other blocks but the latest.

        Of that too what takes turns with the block: it is none that is worked with, whose neighbours lie elsewhere.
        """
        memory = self._flat.weights_memory
        others = [other for other in self._gathered if other is not block]
        self._gathered = [*others[-1:], block]
        for other in others[:-1]:
            self._free(unit for unit in other.units if not any(unit in kept.units for kept in self._gathered))
        taken = {id(memory.holder(unit.weights)) for unit in block.units}
        for other in others[-1:]:
            self._free(unit for unit in other.units if unit not in block.units and id(unit.weights) in taken)
        for unit in block.units:
            if memory.take(unit.weights):
                self._flat.refresh(unit)
                self._gathering[unit] = self._begin_gather(unit)

    def _await(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self._gathering.pop(unit, done)()

    def _free(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self._await([unit])
            self._flat.weights_memory.give_back(unit.weights)

    def _enter(self, block: Block, direction: int) -> None:
        """Wait for a block's weights, and begin to gather the next: forward at `direction` 1, backward at -1."""
        self._gather(block)
        self._await(block.units)
        # none where a virtual stage ends
        following = next((other for other in self._blocks if other.number == block.number + direction), None)
        if following is not None and any(unit.holders.sharers.overlaps for unit in following.units):
            self._gather(following)

    # hooks

    def _before_forward(self, block: Block, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._zero_stage == 3:
            self._enter(block, 1)
        x = arguments[0]
        if not torch.is_grad_enabled():
            return arguments
        if self._zero_stage >= 2 and isinstance(module, Head):
            # the head computes the gradient of its matrix along with the loss
            for unit in block.units:
                self._allocate_grads(unit)
        if not x.requires_grad:
            return arguments
        return (apply(_OnBackward, x, partial(self._after_backward, block)), *arguments[1:])

    def _after_forward(self, block: Block, module: nn.Module, arguments: tuple[Any, ...], y: Tensor) -> Tensor:
        if isinstance(module, Head) or not (torch.is_grad_enabled() and y.requires_grad):
            return y
        return apply(_OnBackward, y, partial(self._before_backward, block))

    def _before_backward(self, block: Block) -> None:
        if self._zero_stage == 3 and block.finished:
            self._enter(block, -1)
        if self._zero_stage >= 2:
            for unit in block.units:
                self._allocate_grads(unit)

    def _after_backward(self, block: Block) -> None:
        for unit in block.finished:
            if self._zero_stage >= 2:
                # the head's gradients are computed with the loss: under GPipe those of all micro-batches are summed
                # with the first backward
                if unit in self._accumulating:
                    self._begin_sum(unit)
                continue
            self._added[unit] += 1
            if self._added[unit] == self._micro_batches:
                self._begin_sum(unit)
