"""The operators of a transformer layer, each in the implementation that the stack picks.

Where layers differ in their sliding window, they are those of the mean layer.

Kept tensors follow Korthikanti et al., arXiv 2205.05198, eq. (1) and (2), written out one by one so that element
sizes, TP, sequence parallelism, flash attention and unfused kernels each count; benchmarks/results/traced.md lays them
beside what other software's own code keeps. Passes over memory follow the kernels'
reads and writes: a pass is one read or one write of every element.
"""

from __future__ import annotations

from trimaran.nouns.model import LayerKind
from trimaran.operators.attention import attention_operator, rotary_operator
from trimaran.operators.latent import latent_block
from trimaran.operators.mixture import mixture_block
from trimaran.operators.mlp import mlp_products
from trimaran.operators.norm import norm_after, norm_before, query_key_norm
from trimaran.operators.operator import Operator, Part
from trimaran.operators.pieces import (
    as_cast,
    context_kept,
    linear,
    normed_tensor,
    outputs_of,
    residual,
    unsummed_tensor,
)  # fmt: skip


def layer_operators(part: Part, kind: LayerKind | None = None) -> tuple[Operator, ...]:
    """The operators of one layer in their order: attention block, then an MLP or a mixture of experts.

    `kind` is the layer's, or else that of most of the model's layers.
    """
    return (*first_block(part), *second_block(part, kind or part.model.main_kind))


def first_block(part: Part) -> tuple[Operator, ...]:
    """Attention, the same in layers of every kind."""
    return attention_block(part) if part.model.latent_attention is None else latent_block(part)


def second_block(part: Part, kind: LayerKind) -> tuple[Operator, ...]:
    """What stands behind attention in a layer of a kind."""
    return mlp_block(part) if kind == "dense" else mixture_block(part)


def attention_block(part: Part) -> tuple[Operator, ...]:
    """Norm, qkv, norms of queries and keys, rotary angles, attention, projection, norm and residual."""
    model, t = part.model, part.tp
    queries, keys = float(model.attention_hidden), part.key_features * t
    qkv = (queries + 2.0 * keys) / t
    made = outputs_of(part, queries=queries, keys=keys, values=keys)
    context, whole = queries / t, (unsummed_tensor(part, "projected"),)
    rotary = (rotary_operator(part),) if model.positions == "rotary" else ()
    normed = (query_key_norm(part),) if model.qk_norm != "none" else ()
    return (
        *norm_before(part, "attention norm"),
        linear(
            part, "qkv", qkv, model.hidden, (as_cast(part, normed_tensor(part)),), made, sums="backward", launches=2.0
        ),
        *normed,
        *rotary,
        attention_operator(part),
        linear(part, "projection", model.hidden, context, context_kept(part, context), whole, sums="forward"),
        *norm_after(part, "attention output norm"),
        residual(part, "attention residual"),
    )


def mlp_block(part: Part) -> tuple[Operator, ...]:
    """Norm, up (and gate), activation, down, norm and residual."""
    kept = (as_cast(part, normed_tensor(part)),)
    return (
        *norm_before(part, "MLP norm"),
        *mlp_products(part, part.model.ffn_hidden, kept),
        *norm_after(part, "MLP output norm"),
        residual(part, "MLP residual"),
    )
