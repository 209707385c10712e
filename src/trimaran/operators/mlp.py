"""The products and the activation of an MLP: of a dense layer's, or of the experts that every token goes to."""

from __future__ import annotations

import numpy as np

from trimaran.operators.casts import Number
from trimaran.operators.operator import Operator, Part, Tensor
from trimaran.operators.pieces import as_cast, linear, outputs_of, split_tensor, unsummed_tensor

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
    whole = (unsummed_tensor(part, "down"),)
    return (
        linear(part, f"{prefix}up", up, model.hidden, kept, made, sums="backward"),
        activation_operator(part, f"{prefix}activation", part.tokens * inner),
        linear(part, f"{prefix}down", model.hidden, inner, (activated,), whole, sums="forward"),
    )


def backward_bytes(part: Part, rows: Number, width: Number, weight_element: Number, *, experts: bool) -> Number:
    """Bytes that an MLP's backward holds at its fullest beside all that its layer keeps, of `rows` through `width`.

    The layer's gradient is there all along, and each operator lets go what it kept once its own backward is done. So
    the fullest moment is one of three: when the product down gives its weight's gradient or its input's; when the
    activation has the gradient of what it gave, those of what it read and, of a gate, both halves of these before they
    are joined (experts weigh tokens there, which is one more); or when the product up gives its own. A weight's
    gradient that is summed in wider numbers is first made in `weight_element` bytes; else that is 0. Slices of a
    sequence, and rows of experts, are gathered for the gradients of down, and slices once more for those of up.
    """
    model, hidden = part.model, float(part.model.hidden)
    inner, whole = rows * width * part.element, rows * hidden * part.element
    weight = width * hidden * weight_element
    sliced = 1.0 if experts else np.where(np.asarray(part.repeated) > 1.0, 1.0, 0.0)
    halves = model.mlp_matrices - 1.0
    down = sliced * whole + np.maximum(weight, inner)
    activation = inner * ((4.0 if model.gated_mlp else 1.0) + experts)
    up = np.maximum(halves * weight + (0.0 if experts else sliced * whole), whole) - inner
    return part.hidden_elements * part.element + np.maximum(np.maximum(down, activation), up)


def activation_operator(part: Part, name: str, elements: Number, weights: Number | None = None) -> Operator:
    """GELU, squared ReLU, or a gate's SiLU or GELU times the other half, that leaves so many elements.

    What is not one kernel keeps a tensor of its own, but for a squared ReLU, of which both keep what the ReLU gave.
    `weights` are of the tokens that come to experts: it multiplies by them, which are in fp32, and keeps them, unless
    the stack multiplies what the experts give.
    """
    model, stack = part.model, part.stack
    forward, backward = (2.0, 3.0) if stack.fused_gelu else (4.0, 5.0)
    if model.gated_mlp:
        forward, backward = forward + 2.0, backward + 3.0
    kernel = stack.fused_gelu or stack.lean_activation or (stack.native_gelu and model.mlp == "gelu")
    kernel = kernel or model.mlp == "relu2"
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
