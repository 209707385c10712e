"""The attention block of latent attention: queries, keys and values made from low-rank vectors.

DeepSeek-V2, arXiv 2405.04434, section 2.1, as Megatron-Core makes it (megatron/core/transformer/
multi_latent_attention.py): TP's ranks all make the low-rank vectors, each of its own tokens under sequence parallelism,
gather those and make their own heads of them.
"""

from __future__ import annotations

from trimaran.operators.attention import attention_operator
from trimaran.operators.casts import Number, Operands
from trimaran.operators.norm import norm_after, norm_before, norm_of
from trimaran.operators.operator import Collective, Operator, Part, Product, Tensor
from trimaran.operators.pieces import (
    as_cast,
    context_kept,
    gathered_again,
    hidden_tensor,
    linear,
    product,
    residual,
    unsummed_tensor,
)


def latent_block(part: Part) -> tuple[Operator, ...]:
    """Norm, projections down, their norms, projections up, rotary angles, attention, projection, norm and residual."""
    model, latent = part.model, part.latent
    context = model.heads * latent.value_dim / part.tp
    down = latent.query_rank + latent.kv_rank + latent.rotary_dim
    queries = model.heads * latent.head_dim / part.tp
    keys_values = model.heads * (latent.plain_dim + latent.value_dim) / part.tp
    projected = (unsummed_tensor(part, "projected"),)
    return (
        *norm_before(part, "latent attention norm"),
        _down(part, down),
        _norms(part, float(latent.query_rank + latent.kv_rank)),
        _up(part, "queries up", queries, float(latent.query_rank or model.hidden)),
        _up(part, "keys and values up", keys_values, float(latent.kv_rank)),
        _angles(part),
        attention_operator(part),
        linear(part, "projection", model.hidden, context, context_kept(part, context), projected, sums="forward"),
        *norm_after(part, "attention output norm"),
        residual(part, "attention residual"),
    )


def _down(part: Part, width: int) -> Operator:
    """The low-rank vectors and the keys' rotary part, of this rank's tokens."""
    tokens, hidden = part.tokens / part.repeated, float(part.model.hidden)
    kept = as_cast(part, hidden_tensor(part, "normed hidden"))
    return _product(part, "latent down", tokens, float(width), hidden, (kept,))


def _norms(part: Part, width: float) -> Operator:
    """Norms of the low-rank vectors, which keep them, and what the products behind keep of what they give."""
    elements = part.tokens / part.repeated * width
    normed = as_cast(part, Tensor("normed latents", elements * part.element))
    return norm_of(part, "latent norms", elements, "latents", (normed,), launches=4.0)


def _up(part: Part, name: str, width: Number, rank: float) -> Operator:
    """This rank's heads of all tokens, from the low-rank vectors of the others."""
    gathered = part.tokens * rank * part.element
    collectives = (Collective("all_reduce", "tp", "backward", gathered), *gathered_again(part, gathered))
    return _product(part, name, part.tokens, width, rank, (), collectives)


def _product(
    part: Part, name: str, tokens: Number, n: Number, k: float, kept: tuple[Tensor, ...],
    collectives: tuple[Collective, ...] = (),
) -> Operator:  # fmt: skip
    operands = Operands(n * k, tokens * k, tokens * n, tokens * k, tokens * n)
    return product(part, name, Product(tokens, n, k), operands, kept, launches=2.0, collectives=collectives)


def _angles(part: Part) -> Operator:
    """Rotary parts are turned, and queries, keys and values laid out by heads: each is read and written once.

    Of keys the rotary part comes from the tokens of all TP ranks.
    """
    latent = part.latent
    moved = 2.0 * part.tokens * part.model.heads / part.tp * (2.0 * latent.head_dim + latent.value_dim)
    return Operator(
        "latent angles",
        moved_forward=moved * part.moved_element,
        moved_backward=moved * part.moved_element,
        launches=6.0,
        collectives=(Collective("all_reduce", "tp", "backward", part.tokens * latent.rotary_dim * part.element),),
    )
