"""Low rank: how many numbers PowerSGD sends for those that replicas agree on."""

from __future__ import annotations

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Floats, LayoutGrid, padded_vocab_of
from trimaran.cost.shapes import part_of
from trimaran.layout.compression import LOW_RANK, in_factors
from trimaran.operators.casts import Number
from trimaran.operators.layer import layer_operators

# Bytes that `begin_low_rank_sum` (train/engine/low_rank_sums.py) reads and writes of each number: adding to what was
# not sent, 12, a read for either factor, 8, taking off what is sent, 8, and the sum as it is put in place, 4.
FACTORED = 32.0


def sent_share(case: Case, grid: LayoutGrid) -> Floats:
    """Numbers that are sent for each parameter of a rank: of a layer's matrices and the vocabulary's, over theirs.

    A stage is taken to have its part of both; norms and biases, which are sent as they are, count among the rest.
    """
    model, part = case.model, part_of(case, grid)
    products = [op.forward[0] for op in layer_operators(part, "dense") if op.narrow and op.kernel == "linear"]
    vocabulary = padded_vocab_of(model, case.stack, grid.tp) / grid.tp
    matrices = [(each.n, each.k, model.layers * 1.0) for each in products]
    matrices.append((vocabulary, model.hidden, 1.0 if model.tied_embedding else 2.0))
    zero = np.zeros(len(grid))
    whole = sum((zero + rows * columns * count for rows, columns, count in matrices), zero)
    sent = sum((_sent(rows, columns) * count for rows, columns, count in matrices), zero)
    others = np.maximum(model.parameters / grid.tp - whole, 0.0)
    return np.asarray((sent + others) / (whole + others))


def _sent(rows: Number, columns: Number) -> Floats:
    """Numbers sent of one matrix."""
    return np.asarray(np.where(in_factors(rows, columns), LOW_RANK * (rows + columns), rows * columns))
