"""States: bytes of weights, gradients and optimizer states, and over how many replicas ZeRO shards each."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Bools, Floats, Ints, LayoutGrid, among, any_narrow, by_precision
from trimaran.nouns.precision import PRECISIONS
from trimaran.nouns.stack import Stack
from trimaran.operators.casts import UNCAST, Casts, casts_of

# ZeRO stages from which each is sharded (Rajbhandari et al., arXiv 1910.02054, section 5).
OPTIMIZER, GRADIENTS, WEIGHTS = 1, 2, 3


def shards(grid: LayoutGrid, stage: int) -> Floats:
    """Over how many ranks a replica's state is cut that ZeRO shards from `stage` on; 1 where it is whole.

    Ranks that share a sequence hold the same weights, and share them out as replicas do (Megatron-Core 0.15,
    core/parallel_state.py, lines 795 to 797; torchtitan at 9dec370, parallelisms/parallel_dims.py, dp_shard_cp;
    DeepSpeed 0.18.9, runtime/engine.py, line 1948: seq_data_parallel_group).
    """
    return np.where(_is_sharded(grid, stage), grid.size("shard") * grid.cp, 1).astype(np.float64)


def expert_shards(grid: LayoutGrid, stage: int) -> Floats:
    """The same of routed experts, whose replicas are fewer where a replica's ranks share them out."""
    return np.where(_is_sharded(grid, stage), grid.size("eshard"), 1).astype(np.float64)


def keeps_whole(stack: Stack, grid: LayoutGrid) -> Bools:
    """Where ZeRO-3 gathers weights once an iteration and scatters gradients once, and both are whole in between."""
    return np.asarray(stack.pipelines_keep_whole & (grid.pp > 1) & _is_sharded(grid, WEIGHTS))


def keeps_gathered(stack: Stack, grid: LayoutGrid) -> Bools:
    """Where all weights that were gathered for a forward stay so until the backward.

    Those of FSDP that reshards after the backward alone (SHARD_GRAD_OP: ZeRO 2), and of pipelines that keep them whole.
    """
    until_backward = grid.chose("dp_kind", "fully_sharded") & (grid.zero_stage == GRADIENTS)
    return np.asarray(until_backward | keeps_whole(stack, grid))


def recomputed_share(stack: Stack, grid: LayoutGrid) -> Floats:
    """Share of a stage's layers that full recompute makes again; 0 where recompute is another.

    One in `recompute_every`; where that counts the layers of each virtual stage, as many of each as of the fullest are
    whole ones (Megatron-Core 0.16.1, core/transformer/transformer_block.py, lines 544 to 560).
    """
    every = grid.recompute_every
    share = np.where(grid.chose("recompute", "full"), 1.0 / every, 0.0)
    if not (stack.recomputes_by_stage and (every > 1).any()):
        return share
    most = np.maximum(grid.splits.fullest_stage[grid.split_row], 1)
    return np.where(share > 0.0, np.ceil(most / every) / most, 0.0)


def _is_sharded(grid: LayoutGrid, stage: int) -> Bools:
    """Where ZeRO shards what it shards from `stage` on."""
    return np.asarray((grid.zero_stage >= stage) | grid.chose("dp_kind", "fully_sharded"))


def element_bytes(grid: LayoutGrid) -> Floats:
    """Bytes of an activation or of a working weight."""
    return by_precision(grid.precision, lambda p: p.activation_bytes)


def casts_on(case: Case, precision: Ints) -> Casts:
    """How operands are cast under each precision (index into PRECISIONS); plain numbers where none are: quicker."""
    if not any_narrow(precision):
        return UNCAST
    known = [casts_of(precision, case.stack, case.cluster.device) for precision in PRECISIONS.values()]
    each = {field.name: np.array([getattr(one, field.name) for one in known]) for field in fields(Casts)}
    return Casts(**{name: values[precision] for name, values in each.items()})


def gathered_bytes(case: Case, grid: LayoutGrid) -> Floats:
    """Bytes a sharded weight is gathered in: a working weight's, or those of its cast where the stack casts first."""
    working = element_bytes(grid)
    if not case.stack.gathers_casts:
        return working
    casts = casts_on(case, grid.precision)
    return np.asarray(working * np.where(np.asarray(casts.gathered) > 0, casts.share, 1.0))


def gradient_bytes(grid: LayoutGrid, stack: Stack) -> Floats:
    """Bytes a gradient is kept in: its precision's, or those in which the stack accumulates it."""
    wider = float(stack.grad_bytes_16bit)
    return np.where(_is_wide(grid, stack), wider, by_precision(grid.precision, lambda p: p.gradient_bytes))


def low_gradient_bytes(grid: LayoutGrid, stack: Stack) -> Floats:
    """Bytes of the 16-bit gradients that stay beside the accumulated ones; 0 where there are none."""
    return np.where(_is_wide(grid, stack), float(stack.low_gradient_bytes), 0.0)


def sent_gradient_bytes(grid: LayoutGrid, stack: Stack) -> Floats:
    """Bytes a gradient travels in: those it is kept in, the 16 bit that stay beside the accumulated ones, or as stated.

    DeepSpeed, runtime/engine.py, communication_data_type: bf16 where training is in bf16.
    """
    low, kept = low_gradient_bytes(grid, stack), gradient_bytes(grid, stack)
    if stack.narrow_gradient_stages:
        kept = np.where(among(grid.zero_stage, stack.narrow_gradient_stages), np.minimum(kept, 2.0), kept)
    if stack.wide_sum_stages:
        kept = np.where(among(grid.zero_stage, stack.wide_sum_stages), np.maximum(kept, 4.0), kept)
    return np.where(low > 0, low, kept)


def moment_bytes(grid: LayoutGrid, case: Case) -> Floats:
    """Bytes of all of an optimizer's moments of one parameter: Adam has two, SGD none.

    Beside a master copy they are as wide as the stack holds them.
    """
    moments = 2.0 if case.workload.optimizer == "adam" else 0.0
    held = case.stack.moment_bytes_16bit
    return by_precision(grid.precision, lambda p: moments * (min(held, p.moment_bytes) if p.master else p.moment_bytes))


def stepped_bytes(grid: LayoutGrid, case: Case) -> Floats:
    """Bytes that a step moves of one parameter's weights and moments, each read and written, beside its gradient.

    Beside a master copy working weights are only written.
    """
    master = 2.0 * case.stack.master_weight_bytes
    weights = by_precision(grid.precision, lambda p: master + p.weight_bytes if p.master else 2.0 * p.weight_bytes)
    return weights + 2.0 * moment_bytes(grid, case)


def _is_wide(grid: LayoutGrid, stack: Stack) -> Bools:
    """Where the stack accumulates gradients wider than the precision says: by precision and ZeRO stage."""
    by_word = by_precision(grid.precision, lambda p: float(p.wide in stack.wide_gradients)) > 0
    return by_word & among(grid.zero_stage, stack.wide_gradient_stages)
