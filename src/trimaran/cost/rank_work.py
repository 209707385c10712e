"""What a rank of one stage computes and sends in a step, as the cost model counts it: operations and bytes, no seconds.

A dry run lays them beside what it traced (`study/dry_run.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.effects.copies import between_copies
from trimaran.cost.grid import Ints, LayoutGrid, padded_vocab_of
from trimaran.cost.memory.stage import StageLayers, dense_of_stages, expert_parameters, parameters
from trimaran.cost.shapes import part_of
from trimaran.cost.states import (
    GRADIENTS,
    OPTIMIZER,
    element_bytes,
    gathered_bytes,
    gradient_bytes,
    sent_gradient_bytes,
    shards,
)
from trimaran.layout.axes import groups
from trimaran.layout.layout import Layout
from trimaran.nouns.model import LayerKind
from trimaran.nouns.stack import FOLDED
from trimaran.operators.attention import ATTENTION
from trimaran.operators.casts import Number
from trimaran.operators.ends import embedding_operator, head_operator
from trimaran.operators.layer import layer_operators
from trimaran.operators.modules import shares_again
from trimaran.operators.operator import Operator, Part
from trimaran.operators.scores import keys_met


@dataclass(frozen=True)
class RankWork:
    """Operations of matrix products, and bytes sent along each axis, in all-reduces: half of one is a gather.

    Along `ep` and `etp` they are those of exchanges, each of which counts once, and so do a ring's passes along `cp`,
    where ranks that share sequences alone sum their gradients too. `tied`: the first and the last stage, which sum
    theirs of a matrix that both have; of two stages that is along `pp`.
    """

    operations: float
    sent: Mapping[str, float]


def rank_work(case: Case, layout: Layout, stage: int) -> RankWork:
    """The work of a rank of `stage` of the pipeline, from 0, in one step: of local steps the last of a round."""
    grid = LayoutGrid.from_layouts([layout], case.workload, case.stack)
    part, micro_batches = part_of(case, grid), _number(grid.micro_batches)
    layers = float(grid.splits.layers(grid.split_row).sum(axis=1)[0, stage])
    dense = float(dense_of_stages(case.model, grid)[0, stage])
    folded = layout.schedule in FOLDED
    is_first, is_last = stage == 0, stage == (0 if folded else layout.pp - 1)
    kinds: dict[LayerKind, float] = {"dense": dense, case.model.main_kind: layers - dense}
    of_layers = [(count, layer_operators(part, kind)) for kind, count in kinds.items()]
    ends: list[Operator] = [embedding_operator(part)] if is_first else []
    if is_last:
        ends.append(head_operator(part, padded_vocab_of(case.model, case.stack, grid.tp)))
    runs = [(count, operators, _again(case, layout, operators)) for count, operators in of_layers]
    keeps_sums = bool(case.stack.selective_keeps) and layout.recompute == "selective"
    runs.append((1.0, tuple(ends), [0.0 for _ in ends]))
    attended = _attended(layout, part)
    operations = sum(count * _operations(operators, again, attended) for count, operators, again in runs)
    sent_of = partial(_sent, keeps_sums=keeps_sums, in_halves=layout.sequence_parallel)
    # what goes to experts is stated of one copy of each token, and each of its experts is sent one
    copies = {"tp": 1.0, "ep": float(case.model.top_k), "etp": 1.0}
    sent = {
        axis: micro_batches * each * sum(count * sent_of(axis, operators, again) for count, operators, again in runs)
        for axis, each in copies.items()
        if layout.size(axis) > 1
    }
    if layout.sequence_parallel:
        sent["tp"] += _uncut_gradients(case, grid, kinds)
    if layout.cp > 1:
        sent["cp"] = micro_batches * sum(
            count * _sent_for_context(layout.cp, operators, again) for count, operators, again in runs
        )
    if layout.pp > 1:
        sends = 2 * layout.vpp - is_first - is_last
        if folded and stage == layout.pp - 1:
            sends -= 2  # from the way down to the way up nothing is sent
        sent["pp"] = micro_batches * sends * _number(part.message) / _number(part.repeated)
    for axis, size in _replicas(case, layout, grid, stage):
        sent[axis] = sent.get(axis, 0.0) + size
    if case.model.tied_embedding and is_first != is_last:
        matrix = padded_vocab_of(case.model, case.stack, grid.tp) * case.model.hidden / grid.tp
        axis = "tied" if layout.pp > 2 else "pp"  # of two ranks these are the same
        summed = _number(matrix * gradient_bytes(grid, case.stack) / shards(grid, OPTIMIZER))
        sent[axis] = sent.get(axis, 0.0) + summed
    return RankWork(micro_batches * operations, {axis: size for axis, size in sent.items() if size})


def _again(case: Case, layout: Layout, operators: Sequence[Operator]) -> list[float]:
    """The share of each operator's forward that the layout's recompute runs again."""
    if layout.recompute == "full":
        return [1.0 / layout.recompute_every for _ in operators]
    if layout.recompute == "none":
        return [0.0 for _ in operators]
    return [_number(share) for share in shares_again(layout.recompute, operators, case.stack)]


def _attended(layout: Layout, part: Part) -> float:
    """The share of all scores that attention makes, where those of a causal kernel count in full.

    In steps a rank meets its own tokens' keys causally, and of every other rank's keys it makes half the scores. Blocks
    of queries make what counts twice where time is reckoned.
    """
    met, met_in_blocks = (_number(keys) for keys in keys_met(part))
    in_steps = layout.cp > 1 and layout.cp_kind != "ulysses"
    made = met * (layout.cp + 1.0) / (2.0 * layout.cp) if in_steps else met
    return (made + met_in_blocks) / (met + 2.0 * met_in_blocks)


def _operations(operators: Sequence[Operator], again: Sequence[float], attended: float) -> float:
    """Forward and backward, with the share of each forward that runs again."""
    shares = [attended if operator.name == ATTENTION else 1.0 for operator in operators]
    forward = [sum(_number(product.operations) for product in operator.forward) for operator in operators]
    backward = [sum(_number(product.operations) for product in operator.backward) for operator in operators]
    each = zip(shares, forward, backward, again, strict=True)
    return sum(share * (back + (1.0 + once_more) * ahead) for share, ahead, back, once_more in each)


def _sent(
    axis: str, operators: Sequence[Operator], again: Sequence[float], *, keeps_sums: bool, in_halves: bool
) -> float:
    """Bytes that ranks along an axis sum or exchange, forward and backward, with what of a forward runs again.

    Where a recompute `keeps_sums`, only what it gathers comes again. A sum of TP's ranks, of the forward or of the
    backward, may stand for the two of its halves that sequence parallelism has in both.
    """
    total = 0.0
    for operator, share in zip(operators, again, strict=True):
        for collective in operator.collectives:
            if collective.axis == axis:
                size = _number(collective.size) * (0.5 if (collective.kind, axis) == ("all_gather", "tp") else 1.0)
                repeated = 0.0 if keeps_sums else share
                times = {"forward": 1.0 + repeated, "backward": 1.0, "recompute": float(keeps_sums)}[collective.phase]
                if in_halves and (collective.kind, axis) == ("all_reduce", "tp"):
                    times = 1.0 + 0.5 * repeated
                total += size * times
    return total


def _sent_for_context(ranks: int, operators: Sequence[Operator], again: Sequence[float]) -> float:
    """Bytes sent along `cp`, forward and backward, with what of a forward runs again.

    Keys and values go round a ring but for the last step, their gradients one step further, home.
    """
    total = 0.0
    for operator, share in zip(operators, again, strict=True):
        for collective in operator.collectives:
            if collective.axis == "cp":
                backward = collective.phase == "backward"
                times = {
                    "ring": ranks - 0.5 if backward else ranks - 1.0,
                    "all_gather": 0.5 * ranks,
                    "all_to_all": 1.0,
                }[collective.kind]
                total += _number(collective.size) * times * (1.0 if backward else 1.0 + share)
    return total


def _uncut_gradients(case: Case, grid: LayoutGrid, layers: Mapping[LayerKind, float]) -> float:
    """Bytes of gradients that TP's ranks sum once a step: each made those of its slice of what none of them cuts.

    Of the mean rank, where replicas share out what they sum.
    """
    model = case.model
    uncut = {"dense": model.uncut_attention_parameters, "experts": model.uncut_parameters}
    each = _number(gradient_bytes(grid, case.stack)) / _number(shards(grid, OPTIMIZER))
    return each * sum(count * uncut[kind] for kind, count in layers.items())


def _replicas(case: Case, layout: Layout, grid: LayoutGrid, stage: int) -> Iterator[tuple[str, float]]:
    """Bytes by which ranks that hold the same weights agree, and the axis that these lie along.

    Gradients are summed and under ZeRO weights gathered, each micro-batch in stage 3.
    """
    layers = grid.splits.layers(grid.split_row).sum(axis=1)[:, stage] * 1.0
    dense = dense_of_stages(case.model, grid)[:, stage]
    ends = np.array([stage == 0]), np.array([stage == (0 if layout.schedule in FOLDED else layout.pp - 1)])
    shape = StageLayers(layers, *ends, dense)
    held = _number(parameters(case.model, case.stack, grid, shape))
    gradient, weight = _number(sent_gradient_bytes(grid, case.stack)), _number(gathered_bytes(case, grid))
    zero = 3 if layout.dp_kind == "fully_sharded" else layout.zero_stage
    experts = _number(expert_parameters(case.model, grid, shape)) if case.model.experts else 0.0
    times = _number(grid.micro_batches)
    # of a number that ranks share out, in all-reduces
    shared_out = (0.0, (gradient + weight) / 2, (times * gradient + weight) / 2, times * (gradient / 2 + weight))[zero]
    # what copies of the same weights or shards send each other of one, once a step
    number = np.where(grid.local_steps > 0, 4.0, sent_gradient_bytes(grid, case.stack))
    summed = _number(between_copies(case, grid, number))
    if layout.dp_kind == "parameter_server":
        summed = (gradient + _number(element_bytes(grid))) / 2
    shares = zero > 0
    at_once = _summed_at_once(case, layout, grid, stage) if zero >= GRADIENTS else 0.0
    for numbers, once, sharing, holding in (
        (held - experts, at_once, ("cp", "shard"), ("replicate",) if shares else ("cp", "dp")),
        (experts, 0.0, ("eshard",), ("ereplicate",) if shares else ("edp",)),
    ):
        sharers = layout.fold(*sharing) if shares else 1
        if sharers > 1:
            yield _along(layout, *sharing), numbers * shared_out - once * (times - 1.0) * gradient / 2
        if layout.fold(*holding) > 1:
            yield _along(layout, *holding), numbers / sharers * summed


def _summed_at_once(case: Case, layout: Layout, grid: LayoutGrid, stage: int) -> float:
    """Numbers of the head's matrix, where gradients of all micro-batches are summed with those of the first.

    They are made with the losses, which under GPipe are all made before the first backward.
    """
    if layout.schedule != "gpipe" or layout.pp == 1 or stage < layout.pp - 1:
        return 0.0
    return _number(padded_vocab_of(case.model, case.stack, grid.tp) * case.model.hidden / grid.tp)


def _along(layout: Layout, *parts: str) -> str:
    """The axis of ranks that hold the same weights: `dp`, but where those along another one are the same ranks."""
    others = [axis for axis in ("cp", "tp") if layout.size(axis) == layout.fold(*parts)]
    ranks = groups(layout, *parts)[0] if others else ()
    return next((axis for axis in others if groups(layout, axis)[0] == ranks), "dp")


def _number(value: Number | Ints) -> float:
    """The one number of an array over a single layout."""
    return float(np.asarray(value).reshape(-1)[0])
