"""The operators of a dense transformer layer, each in the implementation that the stack picks.

Where layers differ in their sliding window, they are those of the mean layer.

Kept tensors follow Korthikanti et al., arXiv 2205.05198, eq. (1) and (2), written out one by one so that element
sizes, TP, sequence parallelism, flash attention and unfused kernels each count; benchmarks/results/traced.md lays them
beside what other software's own code keeps. Passes over memory follow the kernels'
reads and writes: a pass is one read or one write of every element.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimaran.operators.casts import UNCAST, Number, Operands, cast_bytes
from trimaran.operators.norm import is_eager, is_joint, norm_after, norm_before, query_key_norm
from trimaran.operators.operator import SOFTCAP_PASSES, Collective, Operator, Part, Phase, Product, Tensor

# Bytes an element of rotary angles in PyTorch's eager operators: casts to fp32 and back, complex products.
EAGER_ROTARY_BYTES = 20.0
# What scores add to the host's launches where Megatron's fused softmax does not take them: scale, mask, two casts or
# copies.
UNFUSED_SOFTMAX_LAUNCHES = 5.0


def layer_operators(part: Part) -> tuple[Operator, ...]:
    """The operators of one layer in their order: attention block, then MLP block."""
    return (*attention_block(part), *mlp_block(part))


def attention_block(part: Part) -> tuple[Operator, ...]:
    """Norm, qkv, norms of queries and keys, rotary angles, attention, projection, norm and residual."""
    model, t = part.model, part.tp
    queries, keys = float(model.attention_hidden), part.key_features * t
    qkv = (queries + 2.0 * keys) / t
    made = _outputs(part, queries=queries, keys=keys, values=keys)
    context, whole = queries / t, (_hidden(part, "projected"),)
    rotary = (_rotary(part),) if model.positions == "rotary" else ()
    normed = (query_key_norm(part),) if model.qk_norm != "none" else ()
    return (
        *norm_before(part, "attention norm"),
        _linear(part, "qkv", qkv, model.hidden, (_cast(part, _normed(part)),), made, sums="backward", launches=2.0),
        *normed,
        *rotary,
        _flash_attention(part) if part.stack.flash_attention else _attention(part),
        _linear(part, "projection", model.hidden, context, _context(part, context), whole, sums="forward"),
        *norm_after(part, "attention output norm"),
        _residual(part, "attention residual"),
    )


def mlp_block(part: Part) -> tuple[Operator, ...]:
    """Norm, up (and gate), activation, down, norm and residual."""
    model = part.model
    up, width = model.ffn_hidden * (model.mlp_matrices - 1) / part.tp, model.ffn_hidden / part.tp
    names = ("gate", "up") if model.gated_mlp else ("up",)
    made = _outputs(part, **dict.fromkeys(names, float(model.ffn_hidden)))
    return (
        *norm_before(part, "MLP norm"),
        _linear(part, "up", up, model.hidden, (_cast(part, _normed(part)),), made, sums="backward"),
        _activation(part),
        _linear(
            part,
            "down",
            model.hidden,
            width,
            (_cast(part, _split(part, "activated", width)),),
            (_hidden(part, "down"),),
            sums="forward",
        ),
        *norm_after(part, "MLP output norm"),
        _residual(part, "MLP residual"),
    )


def _hidden(part: Part, name: str) -> Tensor:
    return Tensor(name, part.hidden_elements * part.element)


def _normed(part: Part) -> Tensor:
    """What a column-cut product keeps of its input: this rank's slice under sequence parallelism, or all of it."""
    normed = _hidden(part, "normed hidden")
    return Tensor(normed.name, normed.size * (part.repeated if part.stack.keeps_gathered else 1.0))


def _cast(part: Part, kept: Tensor) -> Tensor:
    """What a product keeps of its input, narrower where the stack keeps what it cast."""
    is_kept = part.casts is not UNCAST and part.stack.keeps_casts
    return Tensor(kept.name, kept.size * part.casts.share) if is_kept else kept


def _context(part: Part, width: Number) -> tuple[Tensor, ...]:
    """What attention leaves, which its own backward reads too, and the copy that is cast for the projection."""
    context = _split(part, "context", width)
    if part.casts is UNCAST or not part.stack.keeps_casts:
        return (context,)
    cast = np.where(np.asarray(part.casts.element) > 0, _cast(part, context).size, 0.0)
    return (context, Tensor("context as cast", cast))


def _split(part: Part, name: str, width: Number) -> Tensor:
    """A tensor of `width` features a token on each TP rank."""
    return Tensor(name, part.tokens * width * part.element)


def _linear(
    part: Part, name: str, n: Number, k: Number, kept: tuple[Tensor, ...], made: tuple[Tensor, ...], *, sums: Phase,
    launches: float = 1.0,
) -> Operator:  # fmt: skip
    """Tokens x k times k x n; backward once for the input's gradient and once for the weight's.

    TP sums the output forward where its input is split, and the input's gradient backward where its output is
    (Shoeybi et al., arXiv 1909.08053); under sequence parallelism a reduce-scatter and an all-gather move the same.
    """
    tokens = part.tokens
    inputs, gradients = tokens * k, tokens * n
    slices = (part.repeated, 1.0) if sums == "backward" else (1.0, part.repeated)
    operands = Operands(n * k, inputs, gradients, inputs / slices[0], gradients / slices[1])
    cast_forward, cast_backward = cast_bytes(part.casts, part.stack, operands, eager=is_eager(part))
    return Operator(
        name,
        forward=(Product(tokens, n, k),),
        backward=(Product(tokens, k, n), Product(k, n, tokens)),
        narrow=True,
        moved_forward=cast_forward,
        moved_backward=cast_backward,
        inputs=kept,
        outputs=made,
        launches=launches + np.where((np.asarray(part.tp) > 1) & (sums == "forward"), 1.0, 0.0),
        collectives=(Collective("all_reduce", "tp", sums, part.layer_message),),
    )


def _rotary(part: Part) -> Operator:
    model = part.model
    turned = part.tokens * (model.attention_hidden / part.tp + part.key_features) * model.rotary_share
    moved = turned * (EAGER_ROTARY_BYTES if is_eager(part) else 2.0 * part.moved_element)
    return Operator("rotary angles", moved_forward=moved, moved_backward=moved)


def _queries_keys_values(part: Part) -> tuple[Tensor, ...]:
    """What attention keeps of its inputs.

    A product that makes all three at once leaves values that are a view of its result: rotated queries and keys stand
    beside the whole of it. Repeated keys and values are as wide as queries.
    """
    model, stack, t = part.model, part.stack, part.tp
    queries, keys = float(model.attention_hidden), part.key_features * t
    seen = queries if stack.repeats_kv else keys
    is_rotary = model.positions == "rotary"
    turned = queries + keys if is_joint(part) else 0.0
    return (
        _split(part, "queries, keys and values", (queries + 2.0 * seen) / t),
        _split(part, "rotated queries and keys", turned / t),
        _split(part, "context before its copy", queries / t if stack.copies_context and is_rotary else 0.0),
    )


def _outputs(part: Part, **widths: Number) -> tuple[Tensor, ...]:
    """Tensors of so many features a token that an operator's products leave, split over TP."""
    return tuple(_split(part, name, width / part.tp) for name, width in widths.items())


def _attention_products(part: Part) -> tuple[Product, Product]:
    """Scores and context of every head, with the masked ones."""
    s, d, batch = float(part.seq_len), float(part.model.head_dim), part.mbs * part.model.heads / part.tp
    return Product(s, s, d, batch), Product(s, d, s, batch)


def _attended_products(part: Part) -> tuple[Product, Product]:
    """The same of a kernel that skips what no query meets, the causal half apart."""
    scores, context = _attention_products(part)
    return replace(scores, n=part.attended), replace(context, k=part.attended)


def _flash_attention(part: Part) -> Operator:
    """Flash attention (Dao, arXiv 2307.08691): the backward makes the scores again, five products for two.

    It caps scores as it makes them, and skips blocks outside of a sliding window.
    """
    scores, context = _attended_products(part)
    return Operator(
        "attention",
        forward=(scores, context),
        backward=(scores, scores, scores, context, context),
        kernel="flash",
        inputs=_queries_keys_values(part),
        inside=(Tensor("log-sum-exp", part.tokens * (part.model.heads / part.tp) * 4.0),),
        outputs=_outputs(part, context=part.model.attention_hidden),
        launches=5.0,
    )


def _attention(part: Part) -> Operator:
    """Scores, softmax and context, with the scores in memory.

    Fused: softmax with its scale and mask, then dropout. Unfused they pass one by one, with casts to fp32 and back
    where the stack wants its softmax in it. A sliding window is a mask: scores outside of it are made all the same.
    """
    stack = part.stack
    products = _attention_products(part)
    scores = products[0].m * products[0].n * products[0].batch
    fused = part.fused_softmax
    casts = 5.0 if stack.fp32_softmax else 0.0
    dropout = 2.5 if stack.dropout else 0.0
    unfused = np.where(fused, 0.0, UNFUSED_SOFTMAX_LAUNCHES) if stack.fused_softmax else 0.0
    capped_forward, capped_backward, capped = SOFTCAP_PASSES if part.model.attention_softcap else (0.0, 0.0, 0.0)
    copies = ((2.0 if stack.dropout else 1.0) if stack.fused_softmax else 3.0) + capped
    return Operator(
        "attention",
        forward=products,
        backward=products + products,
        kernel="batched",
        moved_forward=scores * part.moved_element * (np.where(fused, 2.0, 6.0 + casts) + dropout + capped_forward),
        moved_backward=scores * part.moved_element * (np.where(fused, 3.0, 6.5 + casts) + dropout + capped_backward),
        inputs=_queries_keys_values(part),
        inside=(Tensor("scores", scores * copies * part.element), Tensor("dropout mask", scores * _mask_bytes(part))),
        outputs=_outputs(part, context=part.model.attention_hidden),
        launches=5.0 + unfused,
        drawn=scores if stack.dropout else 0.0,
    )


def _mask_bytes(part: Part) -> Number:
    """Bytes an element of a dropout's mask: one on a GPU, a whole element on a CPU."""
    if not part.stack.dropout:
        return 0.0
    return part.element if part.on_cpu else 1.0


def _residual(part: Part, name: str) -> Operator:
    """Bias, dropout and sum with the hidden state."""
    dropout = part.stack.dropout
    forward, backward = (3.5, 2.5) if dropout else (3.0, 1.0)
    moved = part.hidden_elements * part.moved_element
    return Operator(
        name,
        moved_forward=moved * forward,
        moved_backward=moved * backward,
        inside=(Tensor("dropout mask", part.hidden_elements * _mask_bytes(part)),) if dropout else (),
        launches=2.0,
        drawn=part.tokens * part.model.hidden if dropout else 0.0,
    )


def _activation(part: Part) -> Operator:
    """GELU, or a gate's SiLU or GELU times the other half. What is not one kernel keeps a tensor of its own."""
    model, stack = part.model, part.stack
    forward, backward = (2.0, 3.0) if stack.fused_gelu else (4.0, 5.0)
    if model.gated_mlp:
        forward, backward = forward + 2.0, backward + 3.0
    width = model.ffn_hidden / part.tp
    kernel = stack.fused_gelu or stack.lean_activation or (stack.native_gelu and model.mlp == "gelu")
    kept = () if kernel else (_split(part, "inner activation", width),)
    moved = part.tokens * width * part.moved_element
    return Operator(
        "activation",
        moved_forward=moved * forward,
        moved_backward=moved * backward,
        inputs=(_split(part, "up", width * (model.mlp_matrices - 1.0)),),
        inside=kept,
        launches=2.0,
    )
