"""What a rank of one stage computes and sends in a step, as the cost model counts it: operations and bytes, no seconds.

A dry run lays them beside what it traced (`study/dry_run.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Ints, LayoutGrid, padded_vocab_of
from trimaran.cost.memory.stage import StageShape, parameters
from trimaran.cost.shapes import part_of
from trimaran.cost.states import gathered_bytes, sent_gradient_bytes
from trimaran.layout.layout import Layout
from trimaran.nouns.stack import FOLDED
from trimaran.operators.casts import Number
from trimaran.operators.ends import embedding_operator, head_operator
from trimaran.operators.layer import layer_operators
from trimaran.operators.modules import shares_again
from trimaran.operators.operator import Operator


@dataclass(frozen=True)
class RankWork:
    """Operations of matrix products, and bytes sent along each axis, in all-reduces: half of one is a gather."""

    operations: float
    sent: Mapping[str, float]


def rank_work(case: Case, layout: Layout, stage: int) -> RankWork:
    """The work of a rank of `stage` of the pipeline, from 0, in one step."""
    grid = LayoutGrid.from_layouts([layout], case.workload, case.stack)
    part, micro_batches = part_of(case, grid), _number(grid.micro_batches)
    layers = float(grid.splits.layers(grid.split_row).sum(axis=1)[0, stage])
    folded = layout.schedule in FOLDED
    is_first, is_last = stage == 0, stage == (0 if folded else layout.pp - 1)
    operators = layer_operators(part)
    again = [0.0 for _ in operators]
    if layout.recompute == "full":
        again = [1.0 / layout.recompute_every for _ in operators]
    elif layout.recompute != "none":
        again = [_number(share) for share in shares_again(layout.recompute, operators, case.stack)]
    ends: list[Operator] = [embedding_operator(part)] if is_first else []
    if is_last:
        ends.append(head_operator(part, padded_vocab_of(case.model, case.stack, grid.tp)))
    operations = layers * _operations(operators, again) + _operations(ends, [0.0 for _ in ends])
    summed = layers * _summed(operators, again) + _summed(ends, [0.0 for _ in ends])
    sends = 2 * layout.vpp - is_first - is_last
    if folded and stage == layout.pp - 1:
        sends -= 2  # from the way down to the way up nothing is sent
    message = _number(part.message) / _number(part.repeated)
    sent = {
        "tp": micro_batches * summed if layout.tp > 1 else 0.0,
        "pp": micro_batches * sends * message if layout.pp > 1 else 0.0,
        "dp": _replicas(case, layout, grid, stage) if layout.dp > 1 else 0.0,
    }
    return RankWork(micro_batches * operations, {axis: size for axis, size in sent.items() if size})


def _operations(operators: Sequence[Operator], again: Sequence[float]) -> float:
    """Forward and backward, with the share of each forward that runs again."""
    forward = [sum(_number(product.operations) for product in operator.forward) for operator in operators]
    backward = sum(_number(product.operations) for operator in operators for product in operator.backward)
    return backward + sum((1.0 + share) * each for each, share in zip(forward, again, strict=True))


def _summed(operators: Sequence[Operator], again: Sequence[float]) -> float:
    """Bytes that TP's ranks sum, forward and backward, with the share of each forward that runs again."""
    total = 0.0
    for operator, share in zip(operators, again, strict=True):
        for collective in operator.collectives:
            if collective.axis == "tp":
                total += _number(collective.size) * (1.0 + share if collective.phase == "forward" else 1.0)
    return total


def _replicas(case: Case, layout: Layout, grid: LayoutGrid, stage: int) -> float:
    """Bytes by which replicas agree: gradients summed and under ZeRO weights gathered, each micro-batch in stage 3."""
    layers = grid.splits.layers(grid.split_row).sum(axis=1)[:, stage] * 1.0
    ends = np.array([stage == 0]), np.array([stage == (0 if layout.schedule in FOLDED else layout.pp - 1)])
    held = _number(parameters(case.model, case.stack, grid, StageShape(layers, np.ones(1), *ends)))
    gradients = held * _number(sent_gradient_bytes(grid, case.stack))
    weights = held * _number(gathered_bytes(case, grid))
    times = _number(grid.micro_batches)
    zero = 3 if layout.dp_kind == "fully_sharded" else layout.zero_stage
    agreed = (
        gradients,
        (gradients + weights) / 2,
        (times * gradients + weights) / 2,
        times * (gradients / 2 + weights),
    )
    # where a part of the replicas share out their states, each shard's copies sum its gradients besides, once a step
    copies = layout.size("replicate") > 1 and zero > 0 and layout.dp_kind != "parameter_server"
    return agreed[zero] + (gradients / (layout.cp * layout.size("shard")) if copies else 0.0)


def _number(value: Number | Ints) -> float:
    """The one number of an array over a single layout."""
    return float(np.asarray(value).reshape(-1)[0])
