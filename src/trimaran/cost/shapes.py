"""Distinct shapes of a grid, and what a micro-batch keeps under each: both are computed once a shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Bools, Floats, Ints, LayoutGrid, by_precision, distinct, padded_vocab_of
from trimaran.cost.states import casts_on
from trimaran.operators.ends import head_operator
from trimaran.operators.layer import layer_operators
from trimaran.operators.modules import kept_under
from trimaran.operators.operator import Operator, Part


def part_of(case: Case, grid: LayoutGrid) -> Part:
    """A rank's part of one micro-batch under each layout of the grid."""
    return part_at(case, case.workload.seq_len, grid.tp, grid.mbs, grid.precision, grid.sequence_parallel)


def part_at(case: Case, seq_len: int, tp: Ints, mbs: Ints, precision: Ints, sequence_parallel: Bools | bool) -> Part:
    """A rank's part of one micro-batch of the case's model in each precision (index into PRECISIONS)."""
    on_cpu = case.on_cpu
    return Part(
        model=case.model,
        seq_len=seq_len,
        stack=case.stack,
        on_cpu=on_cpu,
        tp=tp.astype(np.float64),
        mbs=mbs.astype(np.float64),
        sequence_parallel=sequence_parallel,
        element=by_precision(precision, lambda p: p.activation_bytes),
        moved_element=by_precision(precision, lambda p: p.cpu_product_bytes if on_cpu else p.activation_bytes),
        casts=casts_on(case, precision),
    )


def distinct_shapes(grid: LayoutGrid, *more: Ints) -> tuple[LayoutGrid, Ints]:
    """One layout of each distinct shape (and combination of `more`), and each layout's shape."""
    keys = (grid.tp, grid.mbs, grid.precision, grid.sequence_parallel.astype(np.int64), *more)
    first, inverse = distinct(keys)
    return grid.take(first), inverse


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that one micro-batch leaves on a rank between its forward and its backward; arrays over layouts.

    Of one `layer`: all of it; what the layout's partial recompute leaves of it (`partly`; all where it has none); its
    input alone. `logits` of the head. `mlp_gradients`: what the MLP's backward holds beside, where the stack's does.
    """

    layer: Floats
    partly: Floats
    layer_input: Floats
    logits: Floats
    mlp_gradients: Floats


def kept_bytes(case: Case, grid: LayoutGrid) -> KeptBytes:
    """What one layer and the head keep under each layout of the grid."""
    shapes, inverse = distinct_shapes(grid)
    part = part_of(case, shapes)
    operators = layer_operators(part)
    head = head_operator(part, padded_vocab_of(case.model, case.stack, shapes.tp))
    zero = np.zeros(len(shapes))
    layer, layer_input = zero + _size(operators, "inputs", "inside"), zero + part.hidden_elements * part.element
    mlp = part.tokens * (case.model.mlp_matrices * case.model.ffn_hidden / part.tp + case.model.hidden) * part.element
    kept = KeptBytes(
        layer=layer,
        partly=layer,
        layer_input=layer_input,
        logits=zero + _size((head,), "inside"),
        mlp_gradients=zero + (mlp if case.stack.holds_mlp_gradients else 0.0),
    )
    of_layouts = {field.name: getattr(kept, field.name)[inverse] for field in fields(KeptBytes)}
    for word, members in grid.partial_recomputes():
        left = zero + kept_under(word, operators, case.stack, layer_input)
        of_layouts["partly"][members] = left[inverse[members]]
    return KeptBytes(**of_layouts)


def _size(operators: Sequence[Operator], *kinds: Literal["inputs", "inside"]) -> Floats | float:
    """Bytes of the operators' kept tensors."""
    size: Floats | float = 0.0
    for operator in operators:
        for kind in kinds:
            for tensor in getattr(operator, kind):
                size = size + tensor.size
    return size
