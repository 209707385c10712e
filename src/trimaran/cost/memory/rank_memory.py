"""RankMemory: what is on a rank of one stage under each layout, as the parts of a memory table need it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Bools, Floats, LayoutGrid, by_precision, padded_vocab_of
from trimaran.cost.memory.limit import host_share_gib
from trimaran.cost.memory.stage import (
    StageShape,
    expert_parameters,
    layer_parameters,
    parameters,
    stage_layer_parameters,
)  # fmt: skip
from trimaran.cost.shapes import KeptBytes, kept_bytes, stored_bytes
from trimaran.cost.states import (
    OPTIMIZER,
    WEIGHTS,
    element_bytes,
    expert_shards,
    gradient_bytes,
    moment_bytes,
    shards,
)
from trimaran.layout.compression import FORMATS

GIB = 2.0**30


@dataclass
class OnEveryStage:
    """What is the same on a rank of every stage under each layout of a grid, found once: arrays over layouts."""

    case: Case
    grid: LayoutGrid

    @cached_property
    def kept(self) -> KeptBytes:
        """What one layer of most layers' kind and the head keep of one micro-batch."""
        return kept_bytes(self.case, self.grid)

    @cached_property
    def kept_dense(self) -> KeptBytes:
        """What one layer with a dense MLP keeps."""
        return kept_bytes(self.case, self.grid, "dense")

    @cached_property
    def layer(self) -> Floats:
        """Parameters of a layer on a rank."""
        return layer_parameters(self.case.model, self.grid)

    @cached_property
    def gradient(self) -> Floats:
        """Bytes of a kept gradient."""
        return gradient_bytes(self.grid, self.case.stack)

    @cached_property
    def passed(self) -> tuple[Floats, Floats | float, Floats | float]:
        """Bytes of the hidden state that passes between stages, and what stays of a sent one and of a received one.

        Of what was sent all stays, or a TP rank's part where it sent that and the software keeps it; what came whole is
        there twice where the stage works on a copy of it. Zero without a pipeline.
        """
        stack, grid = self.case.stack, self.grid
        hidden = np.where(grid.pp > 1, self.kept.layer_input, 0.0)
        if not stack.clones_received:
            return hidden, hidden if stack.keeps_sent else 0.0, 0.0
        splits = grid.chose("schedule", *stack.splits_sends) & ~grid.sequence_parallel & (grid.tp > 1)
        sent = np.where(splits, hidden / grid.tp, hidden) if stack.keeps_sent else 0.0
        return hidden, sent, np.where(splits, 0.0, hidden)

    @cached_property
    def shards(self) -> tuple[Floats, ...]:
        """Over how many ranks is cut what ZeRO shards from stage 0, 1, 2 and 3 on."""
        return tuple(shards(self.grid, stage) for stage in range(WEIGHTS + 1))

    @cached_property
    def expert_shards(self) -> tuple[Floats, ...]:
        """Over how many ranks are cut experts' parts of it."""
        return tuple(expert_shards(self.grid, stage) for stage in range(WEIGHTS + 1))


@dataclass
class RankMemory:
    """Bytes on a rank of the stage described by `shape` under each layout of the grid; arrays over layouts."""

    case: Case
    grid: LayoutGrid
    shape: StageShape
    every: OnEveryStage

    @cached_property
    def count(self) -> Floats:
        """Parameters on the rank, before ZeRO shards them."""
        return parameters(self.case.model, self.case.stack, self.grid, self.shape)

    @property
    def layer(self) -> Floats:
        """Parameters of the largest layer on the rank."""
        return self.every.layer

    @cached_property
    def of_layers(self) -> Floats:
        """Parameters of all layers on the rank."""
        model = self.case.model
        if model.experts:
            return stage_layer_parameters(model, self.grid, self.shape)
        return np.asarray(self.shape.layers * self.layer)

    @cached_property
    def experts(self) -> Floats:
        """Those of them that are routed experts'."""
        return expert_parameters(self.case.model, self.grid, self.shape)

    @property
    def ends(self) -> Floats:
        """Parameters on the rank that are no layer's: embedding, last norm and head."""
        return self.count - self.of_layers

    @property
    def keeps_unit_places(self) -> bool:
        """Whether places for two layers' whole weights and gradients stay, apart from the ends'."""
        return self.case.stack.keeps_unit_places and self.case.on_cpu

    def kept_of(self, stage: int) -> Floats:
        """Parameters whose part of a state this rank keeps, where ZeRO shards it from `stage` on.

        Experts' are sharded over the replicas of their own group.
        """
        return self._sharded(self.count, stage)

    def kept_of_layers(self, stage: int) -> Floats:
        """Those of them that are layers', and not of the ends."""
        return self._sharded(self.of_layers, stage)

    def _sharded(self, count: Floats, stage: int) -> Floats:
        cut = self.every.shards[stage]
        if not self.case.model.experts:
            return count / cut
        return (count - self.experts) / cut + self.experts / self.every.expert_shards[stage]

    @cached_property
    def has_places(self) -> Bools:
        """Whether a backward's needs have places made ahead here, of which the software knows a number: no head's."""
        return (self.grid.pp > 1) & ~self.shape.head & (self.case.stack.stage_places > 0)

    @cached_property
    def in_flight(self) -> Floats:
        """Micro-batches of which the rank keeps activations, or has places for them beside that at work in forward."""
        if not self.case.stack.stage_places:
            return self.shape.in_flight
        return np.where(self.has_places, self.case.stack.stage_places * self.grid.pp + 1.0, self.shape.in_flight)

    @cached_property
    def element(self) -> Floats:
        """Bytes of an activation or a working weight."""
        return element_bytes(self.grid)

    @property
    def gradient(self) -> Floats:
        """Bytes of a kept gradient."""
        return self.every.gradient

    @cached_property
    def has_master(self) -> Floats:
        """1 where weights have a master copy, else 0."""
        return by_precision(self.grid.precision, lambda p: p.master)

    @cached_property
    def moment_bytes(self) -> Floats:
        """Bytes of the optimizer's moments of one parameter."""
        return moment_bytes(self.grid, self.case)

    @cached_property
    def replica_bytes(self) -> Floats:
        """Bytes by which replicas agree, of a parameter: error feedback; an outer optimizer's weights and momentum.

        And what is on its way, where it comes late.
        """
        error = np.where(self.grid.compression > 0, 4.0, 0.0)
        late = np.where(self.grid.outer_delay > 0, 4.0, 0.0)
        return error + np.where(self.grid.local_steps > 0, 8.0 + late, 0.0)

    @cached_property
    def payload_bytes(self) -> Floats:
        """Bytes of a compressed parameter on its way: what is sent of it, and what comes."""
        payload = np.zeros(len(self.grid))
        for word, sent_as in FORMATS.items():
            payload = np.where(self.grid.chose("compression", word), 2.0 * sent_as.sent_bytes, payload)
        return payload  # of PowerSGD's factors next to none

    @property
    def kept(self) -> KeptBytes:
        """What one layer and the head keep of one micro-batch."""
        return self.every.kept

    @cached_property
    def logits(self) -> Floats:
        """Logits and what the loss keeps beside them, on the stage of the head, with what a pipeline keeps of them."""
        return np.where(self.shape.head, self.kept.logits + self._earlier_logits, 0.0)

    @cached_property
    def _earlier_logits(self) -> Floats | float:
        """Logits of a pipeline's other micro-batches: as the head leaves them where these stay, and what losses keep.

        Under GPipe all losses are made before the first backward, and each keeps the logits in the type that it takes
        them in (torch 2.13, distributed/pipelining/schedules.py, ScheduleGPipe); one that makes gradients keeps those
        of what the head read, beside what the last norm did.
        """
        stack, grid = self.case.stack, self.grid
        if self.case.model.head != "vocabulary":
            return 0.0
        stays = self.element * float(stack.keeps_pipeline_logits)
        is_gpipe = grid.chose("schedule", "gpipe")
        tokens = grid.mbs * (self.case.workload.seq_len / grid.cp)
        read: Floats | float = 0.0
        if stack.loss_makes_gradients:
            read = np.where(is_gpipe, tokens * self.case.model.hidden * self.element + self.kept.layer_input, 0.0)
        else:
            of_losses = stays + 4.0 if stack.fp32_loss else self.element
            stays = np.where(is_gpipe, of_losses, stays)
        words = padded_vocab_of(self.case.model, stack, grid.tp) / grid.tp
        each = tokens * words * stays + read
        return np.where(grid.pp > 1, (grid.micro_batches - 1.0) * each, 0.0)

    @cached_property
    def _at_ends(self) -> Floats | float:
        """What micro-batches in flight hold at the ends of the stage: of the embedding, and of what goes through.

        A hidden state is held for each chunk but that of the head where what was sent stays, and for each but that of
        the embedding where what came is copied; of all micro-batches those gradients, and of those that are not in
        flight those inputs, where places for all of them are made at once.
        """
        stack, grid, shape = self.case.stack, self.grid, self.shape
        held: Floats | float = 0.0
        if stack.dropout or self.case.model.embedding_norm:
            held = np.where(shape.embedding, self.in_flight * self.kept.embedding, 0.0)
        if not (stack.keeps_sent or stack.clones_received or stack.receives_into_all):
            return held
        hidden, sent, came = self.every.passed
        chunks = np.where(grid.folded, 2.0, grid.vpp) if grid.folded.any() else grid.vpp
        senders, receivers = chunks - shape.head, chunks - shape.embedding
        held = held + self.in_flight * (senders * sent + receivers * came)
        if stack.receives_into_all:
            others = np.maximum(grid.micro_batches - self.in_flight, 0.0)
            held = held + hidden * (senders * grid.micro_batches + receivers * others)
        return held

    @cached_property
    def activations(self) -> Floats:
        """What the layers keep of all micro-batches in flight, and what a layer at work makes again, with fragments.

        A micro-batch's own logits are gone before its backward makes the first layer's activations again, so the larger
        of the two counts.
        """
        stack, kept = self.case.stack, self.kept
        full = self.grid.chose("recompute", "full")
        stored = self._stored(kept)
        at_work = np.where(full, kept.layer, kept.layer - kept.partly)
        if stack.recomputes_stage:
            at_work = np.where(full, kept.layer * self.shape.layers, at_work)
        at_work = at_work + np.maximum(np.maximum(kept.mlp_backward, kept.exchange), kept.attention)
        if stack.stage_places:  # a forward runs in memory of its own, beside a backward's
            at_work = at_work + np.where(self.has_places, kept.layer, 0.0)
        offloaded = self.offloads("activations")
        here: Floats = self.in_flight * self.shape.layers
        if stack.offload_waits:
            here, at_work = np.where(offloaded, 0.0, here), at_work + np.where(offloaded, stored, 0.0)
        else:
            # of what is offloaded the layer at work and the one whose tensors are on their way are here
            here = np.where(offloaded, np.minimum(self.shape.layers, 2.0), here)
        factors = kept.factors
        if len(self.case.model.kinds) > 1:
            dense, share = self.every.kept_dense, self.shape.dense / np.maximum(self.shape.layers, 1.0)
            stored = stored + share * (self._stored(dense) - stored)
            factors = factors + share * (dense.factors - factors)
        all_layers = here * stored + self._put_off(factors - stored)
        scale = self.case.calibration.activation_scale
        at_work = np.where(self.shape.layers > 0, at_work, 0.0)
        gone = np.where(self.shape.head, kept.logits, 0.0)
        return scale * (all_layers + self._at_ends) + np.maximum(scale * at_work - gone, 0.0)

    def _put_off(self, more: Floats) -> Floats | float:
        """What is kept for weights' gradients that are put off, where a layer's factors take so many bytes `more`.

        Of the micro-batch at work those of all layers stay until its backward is through.
        """
        zero_bubble = self.grid.chose("schedule", "zero_bubble")
        if not zero_bubble.any():
            return 0.0
        of_others = self.shape.put_off * self.shape.layers * more
        at_work = np.maximum(self.shape.layers - 1.0, 0.0) * np.maximum(more, 0.0)
        return np.where(zero_bubble, of_others + at_work, 0.0)

    def offloads(self, *words: str) -> Bools:
        """Whether one of these lies in the host's memory: what that has no room for stays on the device."""
        chosen = self.grid.chose("offload", *words)
        return chosen & self._has_room if chosen.any() and self.case.cluster.host_mem_gib else chosen

    @cached_property
    def _has_room(self) -> Bools:
        """Whether this rank's share of its host's memory holds what the layout would offload.

        States with the gradients that they are stepped by (and weights); or activations of all micro-batches in flight.
        """
        master = np.where(self.has_master > 0, float(self.case.stack.master_weight_bytes), 0.0)
        states = self.kept_of(OPTIMIZER) * (self.moment_bytes + master + self.gradient)
        weights = np.where(self.grid.chose("offload", "weights"), self.kept_of(WEIGHTS) * self.element, 0.0)
        activations = self.in_flight * self.shape.layers * self._stored(self.kept)
        offloaded = np.where(self.grid.chose("offload", "activations"), activations, states + weights)
        return np.asarray(offloaded <= host_share_gib(self.case.cluster, self.grid.devices) * GIB)

    def _stored(self, kept: KeptBytes) -> Floats:
        """Bytes that a layer keeps of a micro-batch under the layout's recompute."""
        return stored_bytes(self.case.stack, self.grid, kept, self.shape.layers)

    @cached_property
    def step_copies(self) -> Floats:
        """Copies of gradients that come and go once the backward is through.

        Where gradients are kept in 16 bit, the step makes fp32 ones of those that it updates by; before that replicas
        sum one tensor of them all, where the stack flattens them.
        """
        narrow = (self.has_master > 0) & (self.gradient == 2.0)
        copies = self.kept_of(OPTIMIZER) * np.where(narrow, 4.0, 0.0)
        flattened = self.grid.chose("precision", *self.case.stack.flattened_gradients)
        return np.where(flattened, np.maximum(copies, self.count * self.gradient), copies)
