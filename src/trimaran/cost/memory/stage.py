"""What a rank of one pipeline stage holds: layers, micro-batches in flight, ends, and the parameters that follow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimaran.cost.grid import Bools, Floats, LayoutGrid, padded_vocab_of
from trimaran.nouns.model import Model
from trimaran.nouns.stack import Stack


@dataclass(frozen=True)
class StageShape:
    """What a rank of one stage holds: layers, micro-batches in flight (in units of whole stages), ends."""

    layers: Floats
    in_flight: Floats
    embedding: Bools
    head: Bools


def end_shapes(grid: LayoutGrid) -> tuple[StageShape, StageShape, StageShape]:
    """The first, the fullest middle and the last stage of every layout."""
    single = grid.pp == 1
    yes, no = np.ones(len(grid), dtype=bool), np.zeros(len(grid), dtype=bool)
    last = np.maximum(grid.pp - 1, 0).astype(np.float64)
    first, second = np.zeros(len(grid)), np.minimum(last, 1.0)
    layers = grid.splits.first, grid.splits.middle, grid.splits.last
    counts = [ranks[grid.split_row].astype(np.float64) for ranks in layers]
    return (
        StageShape(counts[0], in_flight(grid, first), yes, single),
        StageShape(counts[1], in_flight(grid, second), no, no),
        StageShape(counts[2], in_flight(grid, last), single, yes),
    )


def in_flight(grid: LayoutGrid, stage: Floats) -> Floats:
    """Micro-batches whose activations a rank of `stage` (0 the first) keeps at the peak.

    1F1B and zero-bubble (ZB-H1): p - stage; GPipe: all; interleaved: 2 (p - stage - 1) + (v - 1) p + 1
    chunks of 1/v of its layers (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    m, p, v = grid.micro_batches.astype(np.float64), grid.pp, grid.vpp
    one_f_one_b = np.minimum(p - stage, m)
    chunks = np.minimum(2.0 * (p - stage - 1) + (v - 1.0) * p + 1.0, m * v) / v
    flying = np.where(grid.chose("schedule", "gpipe"), m, one_f_one_b)
    flying = np.where(grid.chose("schedule", "interleaved"), chunks, flying)
    return np.where(p > 1, flying, 1.0)


def parameters(model: Model, stack: Stack, grid: LayoutGrid, shape: StageShape) -> Floats:
    """Parameters on a rank of the stage, before ZeRO shards them."""
    t = grid.tp
    vocabulary = padded_vocab_of(model, stack, t) * model.hidden / t
    fixed = model.embedding_parameters() - (-(-model.vocab // 128) * 128) * model.hidden
    head_here = shape.head & (model.head == "vocabulary")
    if model.tied_embedding:
        # A tied head is the embedding itself where both sit on one stage, and a copy of it elsewhere.
        head_here = head_here & ~shape.embedding & stack.tied_embedding_replicated
    return (
        shape.layers * model.layer_parameters / t
        + np.where(shape.embedding, vocabulary + fixed, 0.0)
        + np.where(head_here, vocabulary, 0.0)
        + np.where(shape.head, float(model.norm_parameters), 0.0)
    )


def fullest_parameters(model: Model, stack: Stack, grid: LayoutGrid) -> Floats:
    """Parameters on the rank that has most of them."""
    first, middle, last = (parameters(model, stack, grid, shape) for shape in end_shapes(grid))
    return np.maximum(np.maximum(first, middle), last)
