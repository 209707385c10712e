"""The operators by which a module for a further token joins the layers' result with the next token's embedding."""

from __future__ import annotations

from dataclasses import replace

from trimaran.operators.norm import norm_of
from trimaran.operators.operator import Collective, Operator, Part
from trimaran.operators.pieces import as_cast, hidden_tensor, linear, normed_tensor


def joining_operators(part: Part) -> tuple[Operator, ...]:
    """Norms of embedding and hidden state, the product of both side by side, and the norm behind the module's layer.

    The product is cut by its output, which is gathered (DeepSeek-V3, arXiv 2412.19437, equation 21; Megatron-Core 0.15,
    transformer/multi_token_prediction.py, MultiTokenPredictionLayer).
    """
    hidden = part.hidden_elements
    kept = tuple(as_cast(part, normed_tensor(part)) for _ in range(2))
    width, inside = part.model.hidden / part.tp, 2.0 * part.model.hidden
    joining = linear(part, "joining", width, inside, kept, (hidden_tensor(part, "joined"),), sums="backward")
    gathered = tuple(Collective("all_reduce", "tp", phase, part.layer_message) for phase in ("backward", "forward"))
    return (
        norm_of(part, "embedding norm", hidden, "embedding"),
        norm_of(part, "hidden norm", hidden, "hidden"),
        replace(joining, collectives=(*joining.collectives, *gathered)),
        norm_of(part, "last norm", hidden, "last hidden"),
    )
