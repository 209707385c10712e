"""The products and the activation of an MLP: of a dense layer's, or of the experts that every token goes to."""

from __future__ import annotations

from trimaran.operators.casts import Number
from trimaran.operators.operator import Operator, Part, Tensor
from trimaran.operators.pieces import as_cast, hidden_tensor, linear, outputs_of, split_tensor

FP32 = 4.0
# Bytes an element that moves where 16 bit are multiplied by tokens' weights in fp32 by kernels of their own: forward
# the product in fp32 and its cast back; backward the gradient's cast, both products in fp32, a cast and a sum.
WEIGHING_BYTES = (12.0, 34.0)


def mlp_products(part: Part, width: int, kept: tuple[Tensor, ...], prefix: str = "") -> tuple[Operator, ...]:
    """Up (and gate), activation and down of an MLP of an inner `width`, of whose input `kept` is kept."""
    model = part.model
    names = ("gate", "up") if model.gated_mlp else ("up",)
    made = outputs_of(part, **dict.fromkeys(names, float(width)))
    up, inner = width * (model.mlp_matrices - 1) / part.tp, width / part.tp
    activated = as_cast(part, split_tensor(part, "activated", inner))
    whole = (hidden_tensor(part, "down"),)
    return (
        linear(part, f"{prefix}up", up, model.hidden, kept, made, sums="backward"),
        activation_operator(part, f"{prefix}activation", part.tokens * inner),
        linear(part, f"{prefix}down", model.hidden, inner, (activated,), whole, sums="forward"),
    )


def activation_operator(part: Part, name: str, elements: Number, weights: Number | None = None) -> Operator:
    """GELU, or a gate's SiLU or GELU times the other half, that leaves so many elements.

    What is not one kernel keeps a tensor of its own. `weights` are of the tokens that come to experts: it multiplies by
    them, which are in fp32, and keeps them, unless the stack multiplies what the experts give.
    """
    model, stack = part.model, part.stack
    forward, backward = (2.0, 3.0) if stack.fused_gelu else (4.0, 5.0)
    if model.gated_mlp:
        forward, backward = forward + 2.0, backward + 3.0
    kernel = stack.fused_gelu or stack.lean_activation or (stack.native_gelu and model.mlp == "gelu")
    kept = [] if kernel else [Tensor("inner activation", elements * part.element)]
    moved_forward, moved_backward = elements * part.moved_element * forward, elements * part.moved_element * backward
    weighed: Number = 0.0
    if weights is not None and not stack.weighs_results:
        weighed = weights * FP32
        if not (stack.fused_gelu or stack.lean_activation):
            # a product of its own, whose result is cast back: its operand is kept, too
            kept.append(Tensor("unweighed", elements * part.element))
            moved_forward = moved_forward + elements * WEIGHING_BYTES[0]
            moved_backward = moved_backward + elements * WEIGHING_BYTES[1]
    return Operator(
        name,
        moved_forward=moved_forward + weighed,
        moved_backward=moved_backward + weighed,
        inputs=(Tensor("up", elements * (model.mlp_matrices - 1.0) * part.element + weighed),),
        inside=tuple(kept),
        launches=2.0,
    )
