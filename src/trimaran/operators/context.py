"""What ranks that share a sequence send each other at attention, and what they hold for it.

Ring attention: Liu et al., arXiv 2310.01889, each rank with an early and a late block as Transformer Engine has it.
All-gather of keys and values: Llama 3, arXiv 2407.21783, section 3.3.2. Heads dealt out in place of tokens: DeepSpeed
Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimaran.operators.casts import Number
from trimaran.operators.operator import PHASES, Collective, Part

# Passes over a step's result that add it to those before, and the mean share of a rank's tokens that a step is about:
# all of them or, of keys that the early block does not meet, half (Transformer Engine 2.9, pytorch/attention/
# dot_product_attention/context_parallel.py, lines 1600 to 1690 and 2280 to 2420).
MERGE_PASSES, MERGED_SHARE = 3.0, 0.75


def keys_values_bytes(part: Part) -> Number:
    """Bytes of this rank's keys and values, repeated for every head where the stack does so before it sends them."""
    return part.tokens * _keys_values(part) * part.element


def queries_bytes(part: Part) -> Number:
    """Bytes of this rank's queries."""
    return part.tokens * (part.model.attention_hidden / part.tp) * part.element


def result_bytes(part: Part) -> Number:
    """Bytes of what attention leaves on this rank."""
    return part.tokens * (part.model.context_hidden / part.tp) * part.element


def exchanged(part: Part) -> tuple[Collective, ...]:
    """Keys and values passed on round a ring or gathered, or queries, keys, values and the result turned.

    A ring's backward passes the gradients of keys and values on beside them; gathered ones are gathered again, and
    their gradients reduced and scattered. Queries, keys and values are turned one by one, unless the stack does so with
    all of them at once (`turns_jointly`).
    """
    context = part.context
    if context is None:
        return ()
    keys_values = keys_values_bytes(part)
    gathered = Collective("all_gather", "cp", "forward", keys_values * context.gathers)
    queries, repeated = queries_bytes(part), keys_values * _repeats(part)
    read = (queries + repeated,) if part.stack.turns_jointly else (queries, 0.5 * repeated, 0.5 * repeated)
    turned = [size * context.heads for size in (*read, result_bytes(part))]
    return (
        Collective("ring", "cp", "forward", keys_values * context.ring),
        Collective("ring", "cp", "backward", 2.0 * keys_values * context.ring),
        gathered,
        *(replace(gathered, phase="backward") for _ in ("gather", "scatter")),
        *(Collective("all_to_all", "cp", phase, size) for phase in PHASES for size in turned),
    )


def merged_bytes(part: Part) -> tuple[Number, Number]:
    """Bytes that steps move to add up results forward, and gradients of queries, keys and values backward.

    A ring attends step by step, and to gathered keys and values the stack may do so too (`gathers_for_steps`).
    """
    context = part.context
    if context is None:
        return 0.0, 0.0
    in_steps = context.ring + context.gathers * float(part.stack.gathers_for_steps)
    passes = MERGE_PASSES * MERGED_SHARE * in_steps * (context.ranks - 1.0)
    return passes * result_bytes(part), passes * (queries_bytes(part) + keys_values_bytes(part))


def working_bytes(part: Part) -> Number:
    """Bytes that attention holds beside its inputs and its result while a layer is at work.

    A ring holds two blocks of keys and values with their gradients, or every step's keys, values and result where the
    stack keeps those until the last (`ring_keeps_steps`). Gathered keys and values are held whole, with their
    gradients. Heads that are dealt out are a copy.
    """
    context = part.context
    if context is None:
        return 0.0
    keys_values, result = keys_values_bytes(part), result_bytes(part)
    steps = context.ranks * (keys_values + MERGED_SHARE * result) if part.stack.ring_keeps_steps else 4.0 * keys_values
    copies = queries_bytes(part) + result + keys_values * _repeats(part)
    return context.ring * steps + context.gathers * 2.0 * context.ranks * keys_values + context.heads * copies


def _keys_values(part: Part) -> Number:
    """Features of keys and values on this rank, as they are sent."""
    model = part.model
    if model.latent_attention is not None or part.stack.repeats_kv:
        return (model.attention_hidden + model.context_hidden) / part.tp
    return 2.0 * part.key_features


def _repeats(part: Part) -> Number:
    """How often keys and values are sent where there are fewer heads of them than ranks."""
    assert part.context is not None
    return np.maximum(1.0, part.context.ranks * part.tp / part.model.kv_heads)
