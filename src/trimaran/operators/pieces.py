"""What the blocks of a layer share: kept tensors, linear products, residuals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimaran.operators.casts import UNCAST, Number, Operands, cast_bytes
from trimaran.operators.norm import is_eager
from trimaran.operators.operator import Collective, Operator, Part, Phase, Product, Tensor


def hidden_tensor(part: Part, name: str) -> Tensor:
    """A tensor as large as this rank's part of the hidden state."""
    return Tensor(name, part.hidden_elements * part.element)


def unsummed_tensor(part: Part, name: str) -> Tensor:
    """What a row-cut product leaves: all of the hidden state on each TP rank, whatever slice of their sum goes on."""
    return split_tensor(part, name, float(part.model.hidden))


def normed_tensor(part: Part) -> Tensor:
    """What a column-cut product keeps of its input: this rank's slice under sequence parallelism, or all of it."""
    normed = hidden_tensor(part, "normed hidden")
    return Tensor(normed.name, normed.size * (part.repeated if part.stack.keeps_gathered else 1.0))


def as_cast(part: Part, kept: Tensor) -> Tensor:
    """What a product keeps of its input, narrower where the stack keeps what it cast."""
    is_kept = part.casts is not UNCAST and part.stack.keeps_casts
    return Tensor(kept.name, kept.size * part.casts.share) if is_kept else kept


def context_kept(part: Part, width: Number) -> tuple[Tensor, ...]:
    """What attention leaves, which its own backward reads too, and the copy that is cast for the projection."""
    context = split_tensor(part, "context", width)
    if part.casts is UNCAST or not part.stack.keeps_casts:
        return (context,)
    cast = np.where(np.asarray(part.casts.element) > 0, as_cast(part, context).size, 0.0)
    return (context, Tensor("context as cast", cast))


def split_tensor(part: Part, name: str, width: Number) -> Tensor:
    """A tensor of `width` features a token on each TP rank."""
    return Tensor(name, part.tokens * width * part.element)


def linear(
    part: Part, name: str, n: Number, k: Number, kept: tuple[Tensor, ...], made: tuple[Tensor, ...], *, sums: Phase,
    launches: float = 1.0,
) -> Operator:  # fmt: skip
    """Tokens x k times k x n; backward once for the input's gradient and once for the weight's.

    TP sums the output forward where its input is split, and the input's gradient backward where its output is
    (Shoeybi et al., arXiv 1909.08053); under sequence parallelism a reduce-scatter and an all-gather move the same.
    """
    tokens = part.tokens
    inputs, gradients = tokens * k, tokens * n
    sliced = np.where(np.asarray(part.casts.sliced) > 0, part.repeated, 1.0)
    slices = (sliced, 1.0) if sums == "backward" else (1.0, sliced)
    operands = Operands(n * k, inputs, gradients, inputs / slices[0], gradients / slices[1])
    sums_forward = np.where((np.asarray(part.tp) > 1) & (sums == "forward"), 1.0, 0.0)
    collectives: tuple[Collective, ...] = (Collective("all_reduce", "tp", sums, part.layer_message),)
    if sums == "backward":
        collectives += gathered_again(part, part.message * part.casts.gathered_share)
    found = product(
        part, name, Product(tokens, n, k), operands, kept, made,
        launches=launches + sums_forward, collectives=collectives,
    )  # fmt: skip
    if sums == "backward":
        return found
    summed = hidden_tensor(part, f"summed {name}")
    return replace(found, arrivals=(replace(summed, size=np.where(np.asarray(part.tp) > 1, summed.size, 0.0)),))


def gathered_again(part: Part, size: Number) -> tuple[Collective, ...]:
    """Further gathers of a product's input, `size` bytes of all TP ranks.

    One for its weight's gradient alone where the stack gathers for it, and one where a selective recompute keeps what
    products leave and not what they read (torchtitan 0.2.2, models/llama3/infra/parallelize.py, lines 36 to 50: of
    collectives reduce-scatters alone are kept).
    """
    gathered = np.where(part.sequence_parallel, size, 0.0)
    phases: tuple[Phase, ...] = ("backward",) if part.stack.gathers_again else ()
    if part.stack.selective_keeps:
        phases += ("recompute",)
    return tuple(Collective("all_gather", "tp", phase, gathered) for phase in phases)


def product(
    part: Part, name: str, forward: Product, operands: Operands, kept: tuple[Tensor, ...],
    made: tuple[Tensor, ...] = (), *, launches: Number, collectives: tuple[Collective, ...] = (),
) -> Operator:  # fmt: skip
    """One product with a weight in the stack's narrow precision, its two backward products, and the casts of all."""
    cast_forward, cast_backward = cast_bytes(part.casts, part.stack, operands, eager=is_eager(part))
    m, n, k = forward.m, forward.n, forward.k
    return Operator(
        name,
        forward=(forward,),
        backward=(Product(m, k, n), Product(k, n, m)),
        narrow=True,
        moved_forward=cast_forward,
        moved_backward=cast_backward,
        inputs=kept,
        outputs=made,
        launches=launches,
        collectives=collectives,
    )


def outputs_of(part: Part, **widths: Number) -> tuple[Tensor, ...]:
    """Tensors of so many features a token that an operator's products leave, split over TP."""
    return tuple(split_tensor(part, name, width / part.tp) for name, width in widths.items())


def mask_bytes(part: Part) -> Number:
    """Bytes an element of a dropout's mask: one on a GPU, a whole element on a CPU."""
    if not part.stack.dropout:
        return 0.0
    return part.element if part.on_cpu else 1.0


def residual(part: Part, name: str) -> Operator:
    """Bias, dropout and sum with the hidden state."""
    dropout = part.stack.dropout
    forward, backward = (3.5, 2.5) if dropout else (3.0, 1.0)
    moved = part.hidden_elements * part.moved_element
    return Operator(
        name,
        moved_forward=moved * forward,
        moved_backward=moved * backward,
        inside=(Tensor("dropout mask", part.hidden_elements * mask_bytes(part)),) if dropout else (),
        launches=2.0,
        drawn=part.tokens * part.model.hidden if dropout else 0.0,
    )
