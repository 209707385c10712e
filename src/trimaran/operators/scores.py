"""Scores of attention: which keys a query meets, and what a layer at work holds of scores and of masks.

A stack whose kernel knows neither windows nor caps attends by blocks of queries there (`attends_in_blocks`): to all
keys that some query of a block meets, with the block's scores in memory. To the keys of one rank after the other it
attends by its kernel, to which windows and ALiBi are biases.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from trimaran.operators.casts import Number
from trimaran.operators.context import keys_values_bytes, queries_bytes, result_bytes
from trimaran.operators.operator import Part

# What a block's backward holds as large as its scores: probabilities, their gradients, those of the scores; tanh of
# scores that are capped (train/model/block_attention.py).
_HELD, _HELD_CAPPED = 3.0, 4.0


def in_steps(part: Part) -> Number:
    """1 where a rank attends to the keys of one rank after the other, else 0."""
    if part.context is None:
        return 0.0
    return part.context.ring + part.context.gathers * float(part.stack.gathers_for_steps)


def in_blocks(part: Part) -> Number:
    """Share of the layers whose attention goes by blocks of queries, which keep neither its result nor sums."""
    model = part.model
    if not part.stack.attends_in_blocks:
        return 0.0
    if model.attention_softcap:
        return 1.0
    if part.on_cpu and model.value_dim != model.head_dim:
        return 1.0 - in_steps(part)
    return np.where(_all_in_blocks(part), 1.0, part.windowed_share) * (1.0 - in_steps(part))


def keys_met(part: Part) -> tuple[Number, Number]:
    """Keys that a query meets in a flash kernel, the masked half counted in, and in blocks: each as mean over layers.

    In steps a window is a mask. Where all layers go by blocks whatever their window, their time is measured so, and a
    window leaves a part of that.
    """
    s, windowed, steps = float(part.seq_len), part.windowed_share, in_steps(part)
    if not part.stack.attends_in_blocks:
        return steps * s + (1.0 - steps) * part.attended, 0.0
    whole, of_window = (_keys_in_blocks(part.seq_len, _block(part), window) for window in (0, _window(part)))
    if part.model.attention_softcap:
        return 0.0, windowed * of_window + (1.0 - windowed) * whole
    measured = np.where(_all_in_blocks(part), windowed * s * of_window / whole, 0.0)
    unmeasured = np.where(_all_in_blocks(part), 0.0, windowed * of_window)
    return steps * s + (1.0 - steps) * ((1.0 - windowed) * s + measured), (1.0 - steps) * unmeasured


def held_bytes(part: Part) -> Number:
    """Bytes that attention holds in its backward: a block's scores or each head's biases, and what goes with them.

    That are gradients of queries, keys, values and the result; in steps of keys and values repeated for every query.
    """
    if not part.stack.attends_in_blocks:
        return 0.0
    rows = queries_bytes(part) + result_bytes(part)
    scores, biases = _block_scores_bytes(part), _biases_bytes(part)
    gradients = np.where(scores > 0, rows + keys_values_bytes(part), np.where(biases > 0, 3.0 * rows, 0.0))
    return scores + biases + gradients


def _block_scores_bytes(part: Part) -> Number:
    """What is held of the fullest block's scores."""
    model, s = part.model, float(part.seq_len)
    all_keys = np.where(_all_in_blocks(part), True, bool(model.attention_softcap) and part.windowed_share < 1.0)
    keys = np.where(all_keys, s, min(s, _block(part) + _window(part) - 1.0))
    copies = _HELD_CAPPED if model.attention_softcap else _HELD
    scores = part.mbs * _heads(part) * _block(part) * keys * part.moved_element
    return np.where(np.asarray(in_blocks(part)) > 0, copies * scores, 0.0)


def _biases_bytes(part: Part) -> Number:
    """Biases of the step that meets a rank's own keys, for each head, which only a GPU's kernel copies them for."""
    if part.on_cpu or part.context is None or not (part.model.positions == "alibi" or part.windowed_share > 0):
        return 0.0
    tokens = part.seq_len / part.context.ranks
    return np.asarray(in_steps(part) * part.mbs * _heads(part) * tokens**2 * part.element)


def _heads(part: Part) -> Number:
    """Heads of queries that a rank attends with."""
    heads = part.model.heads / part.tp
    dealt = 0.0 if part.context is None else part.context.heads * (part.context.ranks - 1.0)
    return heads / (1.0 + dealt)


def shared_mask_bytes(part: Part) -> Number:
    """Bytes of masks that all layers of a rank share: ALiBi's bias of its heads, and in steps of every step's scores.

    A step of own keys has a rank's tokens squared, and every other one half as many (`train/model/positions.py`).
    """
    if not part.stack.alibi_tensor:
        return 0.0
    alibi = float(part.model.positions == "alibi")
    whole = alibi * _heads(part) * float(part.seq_len) ** 2
    if part.context is None:
        return whole * part.element
    ranks, steps = part.context.ranks, in_steps(part)
    of_steps = (part.seq_len / ranks) ** 2 * (ranks + 1.0) / 2.0
    windows, heads = float(part.windowed_share > 0), np.where(alibi > 0, _heads(part), 1.0)
    masks = (windows + alibi * float(part.windowed_share < 1.0)) * heads * of_steps
    return part.element * (steps * masks + (1.0 - steps) * whole)


def _all_in_blocks(part: Part) -> Number:
    """Whether layers go by blocks with and without a window: in bf16 on a CPU, of keys that no queries share."""
    suits = part.on_cpu and part.model.kv_heads == part.model.heads and part.model.positions != "alibi"
    return np.asarray(suits & (np.asarray(part.element) == 2.0) & (np.asarray(part.moved_element) == 2.0))


def _block(part: Part) -> int:
    return min(part.stack.attention_blocks[0 if part.on_cpu else 1], part.seq_len)


def _window(part: Part) -> int:
    """Tokens of the window of those layers that have one."""
    return part.model.sliding_window if part.windowed_share else part.seq_len


@lru_cache(maxsize=256)
def _keys_in_blocks(tokens: int, block: int, window: int) -> float:
    """Keys that a query's block meets, of `window` tokens before each query or of all (0); mean over the queries."""
    begins = np.arange(0, tokens, block)
    ends = np.minimum(begins + block, tokens)
    firsts = np.maximum(begins - window + 1, 0) if window else np.zeros_like(begins)
    return float(np.sum((ends - begins) * (ends - firsts)) / tokens)
