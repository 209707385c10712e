"""The parts of a rank's memory: one entry each, in the order in which tables and pages show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Bools, Floats, LayoutGrid
from trimaran.cost.memory.rank_memory import GIB, OnEveryStage, RankMemory
from trimaran.cost.memory.stage import StageShape
from trimaran.cost.shapes import experts_code_mib
from trimaran.cost.states import (
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    casts_on,
    gathered_bytes,
    keeps_gathered,
    keeps_whole,
    low_gradient_bytes,
    shards,
)
from trimaran.operators.casts import kept_weight_bytes

MIB = 2.0**20


@dataclass(frozen=True)
class MemoryPart:
    """A cause of memory: what it is, for a legend, and its bytes; `allocated`: by the framework's allocator."""

    name: str
    says: str
    size: Callable[[RankMemory], Floats]
    allocated: bool = True


def _weights(rank: RankMemory) -> Floats:
    """Working weights; ZeRO-3 keeps two layers gathered, the one at work and the next, and the ends where these join.

    Software may gather more of them ahead, and all of them may stay so. Where it shards the master copy alone, working
    weights are what is gathered. Copies that were cast for products stay beside them where the stack keeps those.
    """
    share, stack = shards(rank.grid, WEIGHTS), rank.case.stack
    layer, layers = rank.layer, rank.of_layers
    ends = rank.ends if stack.gathers_ends or rank.keeps_unit_places else 0.0
    ahead = 2.0 * layer
    if stack.live_parameters:
        ahead = np.maximum(ahead, np.minimum(float(stack.live_parameters), layers))
    if (kept := keeps_gathered(stack, rank.grid)).any():
        ahead, ends = np.where(kept, layers, ahead), np.where(kept, rank.ends, ends)
    gathered = ahead * gathered_bytes(rank.case, rank.grid) + ends * rank.element
    master_alone = (share > 1) & (rank.has_master > 0) & stack.shards_master
    elsewhere = master_alone | rank.offloads("weights")
    whole: Floats = np.where(elsewhere, 0.0, rank.kept_of(WEIGHTS) * rank.element)
    return whole + np.where(share > 1, gathered, 0.0) + _casts(rank, elsewhere)


def _casts(rank: RankMemory, elsewhere: Bools) -> Floats:
    """Copies that were cast for products, beside the working weights of layers or in their place.

    Those that stand in the place of weights are sharded as these are, and are not where these lie `elsewhere`.
    """
    casts = casts_on(rank.case, rank.grid.precision)
    in_place = np.where(elsewhere, 0.0, rank.kept_of_layers(WEIGHTS))
    held = np.where(np.asarray(casts.gathered) > 0, in_place, rank.of_layers)
    return np.asarray(held * kept_weight_bytes(casts, rank.case.stack))


def _gradients(rank: RankMemory) -> Floats:
    """Accumulated gradients, and where the software keeps them those in 16 bit that were summed into wider ones.

    Where weights lie on the host so do their gradients, but for those of the layer at work, or a rank's part of all
    where that is less. Where replicas share them out and the stack sums them unit by unit, two units' are whole: of
    layers, or of both ends; of both, where places for layers' stay.
    """
    low = low_gradient_bytes(rank.grid, rank.case.stack)
    kept = rank.kept_of(GRADIENTS)
    here = np.where(rank.offloads("weights"), np.minimum(rank.layer, kept), kept)
    if rank.case.stack.sums_by_unit:
        layers, ends = 2.0 * rank.layer, rank.ends
        whole = layers + ends if rank.keeps_unit_places else np.maximum(layers, ends)
        here = here + np.where(shards(rank.grid, GRADIENTS) > 1, np.minimum(whole, rank.count), 0.0)
    if rank.case.stack.pipelines_keep_whole:
        here = np.where(keeps_whole(rank.case.stack, rank.grid), rank.count, here)
    return here * rank.gradient + rank.count * low


def _optimizer(rank: RankMemory) -> Floats:
    """Moments, master copy and what replicas agree by; activations and logits are gone when the step makes copies."""
    master = np.where(rank.has_master > 0, float(rank.case.stack.master_weight_bytes), 0.0)
    copies = np.maximum(rank.step_copies - rank.activations - rank.logits, 0.0)
    here = rank.kept_of(OPTIMIZER) * (rank.moment_bytes + master + rank.replica_bytes) + copies
    return np.where(rank.offloads("optimizer", "weights"), 0.0, here)


def _activations(rank: RankMemory) -> Floats:
    """Kept activations, and the hole that the logits' copies leave where the allocator is known to."""
    fragments = rank.case.stack.fragmentation * rank.logits
    return rank.activations + fragments + rank.kept.mask


def _buffers(rank: RankMemory) -> Floats:
    buckets = np.minimum(rank.count, float(rank.case.stack.bucket_elements)) * 2.0 * rank.gradient
    made = buckets + rank.kept_of(OPTIMIZER) * rank.payload_bytes + _experts_code(rank)
    return rank.case.calibration.buffer_gib * GIB + made


def _experts_code(rank: RankMemory) -> Floats | float:
    """Code that a CPU's library generates for products of experts' two matrices, for every number of rows."""
    return 2.0 * MIB * experts_code_mib(rank.case, rank.grid.precision)


def _context(rank: RankMemory) -> Floats:
    return np.full(len(rank.grid), rank.case.cluster.device.context_gib * GIB)


PARTS: tuple[MemoryPart, ...] = (
    MemoryPart("weights", "working weights", _weights),
    MemoryPart("gradients", "accumulated gradients", _gradients),
    MemoryPart("optimizer", "moments, master weights, and what replicas agree by", _optimizer),
    MemoryPart("activations", "what layers keep for the backward", _activations),
    MemoryPart("logits", "logits and loss", lambda rank: rank.logits),
    MemoryPart("buffers", "communicators, workspaces, buckets, generated code", _buffers, allocated=False),
    MemoryPart("context", "the runtime's own", _context, allocated=False),
)
MEMORY_PARTS: tuple[str, ...] = tuple(part.name for part in PARTS)


@dataclass(frozen=True)
class StageMemory:
    """Bytes on a rank of one stage by part, arrays over layouts (or over the stages of one layout)."""

    parts: Mapping[str, Floats]

    @property
    def total(self) -> Floats:
        """All of it."""
        return reduce(np.add, self.parts.values())

    @property
    def allocated(self) -> Floats:
        """What the framework's allocator hands out: all but context and buffers outside it."""
        return self.total - reduce(np.add, (self.parts[part.name] for part in reversed(PARTS) if not part.allocated))


def stage_memory(case: Case, grid: LayoutGrid, shape: StageShape, every: OnEveryStage | None = None) -> StageMemory:
    """Memory of a rank of the stage described by `shape` under each layout; `every` where it is known already."""
    rank = RankMemory(case, grid, shape, every or OnEveryStage(case, grid))
    scale = np.full(len(grid), case.calibration.memory_scale)
    return StageMemory({part.name: part.size(rank) * scale for part in PARTS})
