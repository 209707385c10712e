"""Distinct shapes of a grid, and what a micro-batch keeps under each: both are computed once a shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from trimaran.cost.case import Case
from trimaran.cost.grid import Bools, Floats, Ints, LayoutGrid, by_precision, distinct, padded_vocab_of
from trimaran.cost.states import casts_on, gradient_bytes, recomputed_share
from trimaran.layout.choices import CHOICE, index_of
from trimaran.nouns.dispatcher import DISPATCHERS
from trimaran.nouns.model import LayerKind
from trimaran.nouns.stack import Stack
from trimaran.operators.casts import Number
from trimaran.operators.context import working_bytes
from trimaran.operators.ends import embedding_operator, head_operator
from trimaran.operators.further_token import joining_operators
from trimaran.operators.layer import layer_operators, second_block
from trimaran.operators.mixture import exchange_bytes, share_met
from trimaran.operators.mlp import backward_bytes
from trimaran.operators.modules import factors_of, kept_under
from trimaran.operators.operator import Context, Operator, Part, Permuting
from trimaran.operators.scores import held_bytes, shared_mask_bytes


def part_of(case: Case, grid: LayoutGrid) -> Part:
    """A rank's part of one micro-batch under each layout of the grid."""
    part = part_at(case, case.workload.seq_len, grid.tp, grid.mbs, grid.precision, grid.sequence_parallel)
    if shares_sequences(grid):
        ways = ((grid.cp_kind == index_of("cp_kind", way)) & (grid.cp > 1) for way in ("ring", "all_gather", "ulysses"))
        part = replace(part, context=Context(grid.cp.astype(np.float64), *(way.astype(np.float64) for way in ways)))
    return with_experts(case, grid, part) if case.model.experts else part


def shares_sequences(grid: LayoutGrid) -> bool:
    """Whether a layout of the grid has context parallelism."""
    return bool((grid.cp > 1).any())


def with_experts(case: Case, grid: LayoutGrid, part: Part) -> Part:
    """The part with the ranks that its experts are spread over under each layout, and how tokens come to them."""
    dispatchers = [DISPATCHERS[name] for name in CHOICE["dispatcher"].words]
    # one more, at index -1, for exchanges that cost nothing
    passes, sorts, held, held_sorted, held_arriving = (
        np.array([*(getattr(each, name) for each in dispatchers), 0.0])[grid.dispatcher]
        for name in ("passes", "sorts", "held", "held_sorted", "held_arriving")
    )
    gathers, merges = (
        np.array([*(getattr(each, name) for each in dispatchers), False])[grid.dispatcher]
        for name in ("gathers", "merges")
    )
    ep = grid.ep.astype(np.float64)
    load, slices = case.workload.expert_load, token_slices(grid)
    # what is gathered comes from all ranks, however busy their experts are
    merged = ep * slices * np.where(gathers, 1.0 / load, share_met(case.model, ep))
    # nothing comes by exchanges that cost nothing
    exchanged = (np.where(gathers | merges, ep * slices, ep) > 1.0) & (grid.dispatcher >= 0)
    there, back = np.where(gathers | merges, (merged, np.ones(len(grid))), float(case.model.top_k)) * exchanged
    return replace(
        part,
        ep=ep,
        etp=grid.size("etp").astype(np.float64),
        load=load,
        permuting=Permuting(
            passes, sorts, held * (ep > 1.0), held_sorted * (ep > 1.0), held_arriving * merged * exchanged, there, back
        ),
    )


def token_slices(grid: LayoutGrid) -> Floats:
    """Ranks that share an expert and hold tokens of their own."""
    etp = grid.size("etp")
    return np.where(grid.sequence_parallel, etp, np.maximum(etp / grid.tp, 1.0))


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
        block_rows=float(case.stack.experts_block_rows) * (experts_code_mib(case, precision) > 0.0),
    )


def experts_code_mib(case: Case, precision: Ints) -> Floats | float:
    """MiB of code that is generated for products of one shape of experts' matrices in each precision; 0: none is."""
    if not (case.model.experts and case.stack.experts_block_rows):
        return 0.0
    probed = case.cluster.device.experts_code_mib
    return by_precision(precision, lambda p: probed.get(p.rate, 0.0))


def distinct_shapes(case: Case, grid: LayoutGrid, *more: Ints) -> tuple[LayoutGrid, Ints]:
    """One layout of each distinct shape (and combination of `more`), and each layout's shape."""
    experts = (grid.ep, grid.size("etp"), grid.dispatcher) if case.model.experts else ()
    context = (grid.cp, grid.cp_kind) if shares_sequences(grid) else ()
    keys = (grid.tp, grid.mbs, grid.precision, grid.sequence_parallel.astype(np.int64), *experts, *context, *more)
    first, inverse = distinct(keys)
    return grid.take(first), inverse


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that one micro-batch leaves on a rank between its forward and its backward; arrays over layouts.

    Of one `layer`: all of it; what the layout's partial recompute leaves of it (`partly`; all where it has none); its
    input alone; `factors`, those of all weights' gradients once they can be made. `embedding`, what stays of the
    lookup. `logits` of the head, and of further tokens. What a layer at work holds besides, one after the other:
    `mlp_backward`, where the stack's does; `attention`, what it holds of other ranks' part of the sequences, and of
    scores and biases beyond what the layer kept behind it, which is gone by then; `exchange`, what experts hold.
    `mask`, what all layers of a rank share.
    """

    layer: Floats
    partly: Floats
    layer_input: Floats
    factors: Floats
    embedding: Floats
    logits: Floats
    mlp_backward: Floats
    attention: Floats
    exchange: Floats
    mask: Floats


def kept_bytes(case: Case, grid: LayoutGrid, kind: LayerKind | None = None) -> KeptBytes:
    """What one layer, of a kind or else of that of most layers, and the head keep under each layout of the grid."""
    shapes, inverse = distinct_shapes(case, grid)
    part = part_of(case, shapes)
    wider, operators = _wider(case, shapes, part), layer_operators(part, kind)
    behind = second_block(part, kind or case.model.main_kind)
    vocab = padded_vocab_of(case.model, case.stack, shapes.tp)
    head = head_operator(part, vocab)
    zero = np.zeros(len(shapes))
    layer, layer_input = zero + _size(operators, "inputs", "inside"), zero + part.hidden_elements * part.element
    mixture = bool(case.model.experts) and kind != "dense"
    kept = KeptBytes(
        layer=layer,
        partly=layer,
        layer_input=layer_input,
        factors=zero + factors_of(operators, part.element),
        embedding=zero + _size((embedding_operator(part),), "inputs", "inside"),
        logits=zero + _logits(case, part, head, vocab, wider) + _further(part, head),
        mlp_backward=zero + (_mlp_backward(part, mixture, wider) if case.stack.holds_mlp_gradients else 0.0),
        attention=zero + working_bytes(part) + np.maximum(held_bytes(part) - _size(behind, "inputs", "inside"), 0.0),
        mask=zero + shared_mask_bytes(part),
        exchange=zero + (np.maximum(*exchange_bytes(part)) if mixture else 0.0),
    )
    of_layouts = {field.name: getattr(kept, field.name)[inverse] for field in fields(KeptBytes)}
    for word, members in grid.partial_recomputes():
        left = zero + kept_under(word, operators, case.stack, layer_input)
        of_layouts["partly"][members] = left[inverse[members]]
    return KeptBytes(**of_layouts)


def stored_bytes(stack: Stack, grid: LayoutGrid, kept: KeptBytes, layers: Floats) -> Floats:
    """Of what a layer keeps, the bytes that the layout's recompute leaves; its stage has so many `layers`."""
    again = recomputed_share(stack, grid)
    of_full = kept.layer_input * again + kept.layer * (1.0 - again)
    if stack.recomputes_stage:
        of_full = kept.layer_input / np.maximum(layers, 1.0)
    return np.where(grid.chose("recompute", "full"), of_full, kept.partly)


def _wider(case: Case, shapes: LayoutGrid, part: Part) -> Floats:
    """Bytes an element of a weight's gradient before it is summed in wider numbers; 0 where it is made in these."""
    return np.where(gradient_bytes(shapes, case.stack) > np.asarray(part.element), part.element, 0.0)


def _mlp_backward(part: Part, mixture: bool, wider: Floats) -> Number:
    """What an MLP's backward holds."""
    model = part.model
    if mixture:
        return backward_bytes(part, part.received, model.moe_ffn_hidden / part.etp, wider, experts=True)
    return backward_bytes(part, part.tokens, model.ffn_hidden / part.tp, wider, experts=False)


def _logits(case: Case, part: Part, head: Operator, vocab: Floats, wider: Floats) -> Number:
    """Logits and what the loss keeps of them, at their fullest.

    Where the loss makes its gradients at once, chunk by chunk, the weight's stands beside the chunk's 16-bit logits,
    and beside all of that what the last norm read and gave, slices of a sequence as they were gathered, and the
    gradient of what the head read.
    """
    logits, stack = _size((head,), "inside"), case.stack
    if not stack.loss_makes_gradients or case.model.head == "classifier":
        return logits
    chunk = stack.loss_chunk_cpu_tokens if case.on_cpu else stack.loss_chunk_gpu_tokens
    rows, hidden = vocab / part.tp, float(case.model.hidden)
    at_product = np.where(wider > 0, np.minimum(part.tokens, chunk) * rows * part.element + rows * hidden * wider, 0.0)
    read = part.tokens * hidden * (1.0 + (np.asarray(part.repeated) > 1.0)) + 2.0 * part.hidden_elements
    return np.maximum(logits, at_product) + read * part.element


def _further(part: Part, head: Operator) -> Floats | float:
    """Bytes that modules for further tokens keep beside their layers: logits of their own, and what joins."""
    if not part.model.mtp_depth:
        return 0.0
    return part.model.mtp_depth * (_size((head,), "inside") + _size(joining_operators(part), "inputs", "inside"))


def _size(operators: Sequence[Operator], *kinds: Literal["inputs", "inside"]) -> Floats | float:
    """Bytes of the operators' kept tensors."""
    size: Floats | float = 0.0
    for operator in operators:
        for kind in kinds:
            for tensor in getattr(operator, kind):
                size = size + tensor.size
    return size
