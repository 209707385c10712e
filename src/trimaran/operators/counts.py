"""Operation counts of a model, from its operators."""

from __future__ import annotations

from functools import lru_cache

from trimaran.nouns.model import LayerKind, Model, padded_vocab
from trimaran.nouns.stack import Stack
from trimaran.operators.ends import head_operator
from trimaran.operators.further_token import joining_operators
from trimaran.operators.layer import layer_operators
from trimaran.operators.operator import Operator, Part

# A kernel that skips what a sliding window masks makes the products that the model needs, and no others.
_LEAST = Stack(flash_attention=True)


def forward_operations(operators: tuple[Operator, ...], *, causal: bool = False) -> float:
    """Operations of the operators' products forward; with `causal` the half of the scores that the mask keeps."""
    return sum(
        float(product.operations) * (0.5 if causal and operator.kernel in ("batched", "flash") else 1.0)
        for operator in operators
        for product in operator.forward
    )


def layer_forward_operations(
    model: Model, seq_len: int, *, causal: bool = False, kind: LayerKind | None = None
) -> float:
    """Operations of one layer's products, forward, per sequence; scores in full unless `causal`.

    The layer is of a `kind`, or else of that of most layers.

    2 s (qkv + projection + MLP weights) + 4 s^2 a_dim for scores and context (Narayanan et al., arXiv 2104.04473,
    appendix). Sliding windows shorten the scores: the mean over the model's layers.
    """
    return forward_operations(layer_operators(Part.whole(model, seq_len, _LEAST), kind), causal=causal)


def layers_forward_operations(model: Model, seq_len: int, *, causal: bool = False) -> float:
    """The same of all layers."""
    return sum(
        count * layer_forward_operations(model, seq_len, causal=causal, kind=kind)
        for kind, count in model.kinds.items()
    )


def further_tokens_forward_operations(model: Model, seq_len: int, tp: int = 1, *, causal: bool = False) -> float:
    """Operations of the modules for further tokens, forward, per sequence: a layer, its joining and a head each."""
    if not model.mtp_depth:
        return 0.0
    layer = layer_forward_operations(model, seq_len, causal=causal)
    joining = forward_operations(joining_operators(Part.whole(model, seq_len, _LEAST)))
    return model.mtp_depth * (layer + joining + head_forward_operations(model, seq_len, tp))


def head_forward_operations(model: Model, seq_len: int, tp: int = 1) -> float:
    """Operations of the logits, forward, per sequence: 2 s h V, the vocabulary padded for `tp`."""
    return forward_operations((head_operator(Part.whole(model, seq_len), padded_vocab(model.vocab, tp)),))


@lru_cache(maxsize=4096)  # a search makes hundreds of grids, whose layouts have a few dozens of TP
def head_in_layers(model: Model, seq_len: int, tp: int = 1) -> float:
    """How many layers the last stage's end weighs, head and modules for further tokens; stage splits use it."""
    end = head_forward_operations(model, seq_len, tp) + further_tokens_forward_operations(
        model, seq_len, tp, causal=True
    )
    return end / layer_forward_operations(model, seq_len, causal=True)
