"""RankMemory: what is on a rank of one stage under each layout, as the parts of a memory table need it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, LayoutGrid, by_precision
from trimaran.cost.memory.stage import StageShape, parameters
from trimaran.cost.shapes import KeptBytes, kept_bytes
from trimaran.cost.states import OPTIMIZER, element_bytes, gradient_bytes, shards


@dataclass
class RankMemory:
    """Bytes on a rank of the stage described by `shape` under each layout of the grid; arrays over layouts."""

    case: Case
    grid: LayoutGrid
    shape: StageShape

    @cached_property
    def count(self) -> Floats:
        """Parameters on the rank, before ZeRO shards them."""
        return parameters(self.case.model, self.case.stack, self.grid, self.shape)

    @cached_property
    def element(self) -> Floats:
        """Bytes of an activation or a working weight."""
        return element_bytes(self.grid)

    @cached_property
    def gradient(self) -> Floats:
        """Bytes of a kept gradient."""
        return gradient_bytes(self.grid, self.case.stack)

    @cached_property
    def has_master(self) -> Floats:
        """1 where weights have a master copy, else 0."""
        return by_precision(self.grid.precision, lambda p: p.master)

    @cached_property
    def moment_bytes(self) -> Floats:
        """Bytes of the optimizer's moments of one parameter."""
        moments = 2.0 if self.case.workload.optimizer == "adam" else 0.0
        return by_precision(self.grid.precision, lambda p: moments * p.moment_bytes)

    @cached_property
    def kept(self) -> KeptBytes:
        """What one layer and the head keep of one micro-batch."""
        return kept_bytes(self.case, self.grid)

    @cached_property
    def logits(self) -> Floats:
        """Logits and what the loss keeps beside them, on the stage of the head."""
        return np.where(self.shape.head, self.kept.logits, 0.0)

    @cached_property
    def activations(self) -> Floats:
        """What the layers keep of all micro-batches in flight, and what a layer at work makes again.

        Logits are gone before the backward pass makes the first layer's activations again, so the larger of the two
        counts; but a heap in which other buffers lie between has no room for large ones where logits were.
        """
        stack, kept, every = self.case.stack, self.kept, self.grid.recompute_every.astype(np.float64)
        full = self.grid.chose("recompute", "full")
        stored = np.where(full, kept.layer_input / every + kept.layer * (1.0 - 1.0 / every), kept.partly)
        at_work = np.where(full, kept.layer, kept.layer - kept.partly)
        if stack.recomputes_stage:
            stored = np.where(full, kept.layer_input / np.maximum(self.shape.layers, 1.0), stored)
            at_work = np.where(full, kept.layer * self.shape.layers, at_work)
        at_work = at_work + kept.mlp_gradients
        reused = 0.0 if stack.heap_keeps_logits and self.case.on_cpu else self.logits
        return self.shape.in_flight * self.shape.layers * stored + np.maximum(at_work - reused, 0.0)

    @cached_property
    def step_copies(self) -> Floats:
        """Where gradients are kept in 16 bit, the step makes fp32 copies of those that it updates by."""
        narrow = (self.has_master > 0) & (self.gradient == 2.0)
        return self.count / shards(self.grid, OPTIMIZER) * np.where(narrow, 4.0, 0.0)
