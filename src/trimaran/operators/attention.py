"""Rotary angles and attention itself, in the implementation that the stack picks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimaran.operators.context import exchanged, merged_bytes
from trimaran.operators.norm import is_eager, is_joint, joint_tensor
from trimaran.operators.operator import SOFTCAP_PASSES, Operator, Part, Product, Tensor
from trimaran.operators.pieces import mask_bytes, outputs_of, split_tensor
from trimaran.operators.scores import in_blocks, in_steps, keys_met

ATTENTION = "attention"
# Bytes an element of rotary angles in PyTorch's eager operators: casts to fp32 and back, complex products.
EAGER_ROTARY_BYTES = 20.0
# What scores add to the host's launches where Megatron's fused softmax does not take them: scale, mask, two casts or
# copies.
UNFUSED_SOFTMAX_LAUNCHES = 5.0


def rotary_operator(part: Part) -> Operator:
    """Rotary angles of queries and keys."""
    model = part.model
    turned = part.tokens * (model.attention_hidden / part.tp + part.key_features) * model.rotary_share
    moved = turned * (EAGER_ROTARY_BYTES if is_eager(part) else 2.0 * part.moved_element)
    kept = joint_tensor(part) if model.qk_norm == "none" else ()
    return Operator("rotary angles", moved_forward=moved, moved_backward=moved, inputs=kept)


def attention_operator(part: Part) -> Operator:
    """Scores, softmax and context: one flash kernel, or as many as the stack has."""
    return _flash_attention(part) if part.stack.flash_attention else _attention(part)


def _queries_keys_values(part: Part) -> tuple[Tensor, ...]:
    """What attention keeps of its inputs.

    A product that makes all three at once leaves values that are a view of its result: rotated queries and keys stand
    beside the whole of it, which the operator before keeps. Repeated keys and values are as wide as queries. Where keys
    of other ranks come one after the other, the stack may copy a rank's own in the order in which they are sent and
    needed (`packs_context`): then only the copies stay.
    """
    model, stack, t = part.model, part.stack, part.tp
    unpacked = 1.0 - in_steps(part) * float(stack.packs_context)
    queries, keys = float(model.attention_hidden), part.key_features * t
    dealt = 0.0 if part.context is None else part.context.heads
    if model.latent_attention is not None:
        latent = split_tensor(part, "queries, keys and values", (2.0 * queries + model.context_hidden) / t)
        return (replace(latent, copied=1.0 - unpacked + dealt),)
    seen = queries if stack.repeats_kv else keys
    is_rotary = model.positions == "rotary"
    whole = split_tensor(part, "queries, keys and values", (queries + 2.0 * seen) / t)
    turned = split_tensor(part, "rotated queries and keys", unpacked * (queries + keys) / t)
    copied = queries * (1.0 if is_rotary else dealt) * (1.0 - in_blocks(part)) if stack.copies_context else 0.0
    return (
        turned if is_joint(part) else whole,
        split_tensor(part, "context before its copy", unpacked * copied / t),
    )


def _attention_products(part: Part) -> tuple[Product, Product]:
    """Scores and context of every head, with the masked ones.

    A rank that has an early and a late block of a sequence has its even share of the causal triangle: as much as that
    share of the heads would have.
    """
    s, batch = float(part.seq_len), part.mbs * part.model.heads / part.tp
    if part.context is not None:
        batch = batch / part.context.ranks
    return Product(s, s, float(part.model.head_dim), batch), Product(s, float(part.model.value_dim), s, batch)


def _attended_products(part: Part) -> tuple[Product, Product]:
    """The same of what skips keys that no query meets: half of what counts is made, as by a causal kernel."""
    scores, context = _attention_products(part)
    met, met_in_blocks = keys_met(part)
    keys = met + 2.0 * met_in_blocks
    return replace(scores, n=keys), replace(context, k=keys)


def _flash_attention(part: Part) -> Operator:
    """Flash attention (Dao, arXiv 2307.08691): the backward makes the scores again, five products for two.

    It caps scores as it makes them, and skips blocks outside of a sliding window; some stacks go by blocks of queries.
    """
    scores, context = _attended_products(part)
    sums = part.tokens * (part.model.heads / part.tp) * 4.0 * (1.0 - in_blocks(part))
    merged_forward, merged_backward = merged_bytes(part)
    return Operator(
        ATTENTION,
        forward=(scores, context),
        backward=(scores, scores, scores, context, context),
        kernel="flash",
        moved_forward=merged_forward,
        moved_backward=merged_backward,
        inputs=_queries_keys_values(part),
        inside=(Tensor("log-sum-exp", sums),),
        outputs=outputs_of(part, context=part.model.context_hidden),
        launches=5.0,
        collectives=exchanged(part),
    )


def _attention(part: Part) -> Operator:
    """Scores, softmax and context, with the scores in memory.

    Fused: softmax with its scale and mask, then dropout. Unfused they pass one by one, with casts to fp32 and back
    where the stack wants its softmax in it. Where Megatron's kernel does not take the shape, PyTorch's softmax keeps
    its probabilities in fp32 (Megatron-LM v2.5, megatron/model/fused_softmax.py, lines 150 to 162, which scaling by
    layer asks for: transformer.py, line 124) beside what dropout makes of the 16-bit ones. A sliding window is a mask:
    scores outside of it are made all the same.
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
    element = np.asarray(part.element)
    # without dropout the product keeps the 16-bit probabilities too, which the kernel's result is at once
    widened = np.where(fused | (element >= 4.0), 0.0, 4.0 - element * stack.dropout) if stack.fused_softmax else 0.0
    return Operator(
        ATTENTION,
        forward=products,
        backward=products + products,
        kernel="batched",
        moved_forward=scores * part.moved_element * (np.where(fused, 2.0, 6.0 + casts) + dropout + capped_forward),
        moved_backward=scores * part.moved_element * (np.where(fused, 3.0, 6.5 + casts) + dropout + capped_backward),
        inputs=_queries_keys_values(part),
        inside=(
            Tensor("scores", scores * (copies * part.element + widened)),
            Tensor("dropout mask", scores * mask_bytes(part)),
        ),
        outputs=outputs_of(part, context=part.model.context_hidden),
        launches=5.0 + unfused,
        drawn=scores if stack.dropout else 0.0,
        collectives=exchanged(part),
    )
