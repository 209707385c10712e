"""The norms of a transformer layer: of its hidden state, and of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from trimaran.operators.casts import Number
from trimaran.operators.operator import Collective, Operator, Part, Phase, Tensor

# Bytes an element beyond a fused kernel's of an RMS norm, forward and backward, in PyTorch's eager operators: casts to
# fp32 and back, square, mean, scale.
EAGER_RMS_NORM_BYTES = (32.0, 50.0)


def norm_before(part: Part, name: str) -> tuple[Operator, ...]:
    """The norm of what attention or MLP reads, where the model has it."""
    if part.model.norm_placement == "after":
        return ()
    norm = _norm(part, name)
    # side by side both blocks norm the same tensor, which is kept once as it is
    is_same = part.model.parallel_residual and name != "attention norm" and _keeps_input(part)
    return (replace(norm, inputs=()) if is_same else norm,)


def norm_after(part: Part, name: str) -> tuple[Operator, ...]:
    """The norm of what attention or MLP gives, where the model has it."""
    return (_norm(part, name),) if part.model.norm_placement != "before" else ()


def _norm(part: Part, name: str) -> Operator:
    """A norm of the hidden state."""
    return norm_of(part, name, part.hidden_elements, "hidden")


def norm_of(
    part: Part, name: str, elements: Number, kept: str, also: tuple[Tensor, ...] = (), launches: float = 2.0
) -> Operator:
    """A norm of so many elements, which it keeps as `kept`; `also` is kept of what it gives.

    What it makes on the way, of several kernels, is made anew where it runs again.
    """
    forward, backward = _norm_bytes(part)
    made = () if _keeps_input(part) else (Tensor("normed", elements * (_norm_kept(part) - part.element)),)
    return Operator(
        name,
        moved_forward=elements * forward,
        moved_backward=elements * backward,
        inputs=(Tensor(kept, elements * part.element), *also),
        inside=made,
        launches=launches,
    )


def query_key_norm(part: Part) -> Operator:
    """Norms of queries and keys, before they are turned.

    Under TP heads that are normed as one need the sum of squares of all ranks' heads, in fp32, for queries and keys;
    their backward needs another such sum. Where one product makes queries, keys and values, its result is kept whole
    beside what attention keeps (`joint_tensor`), and is the input that the norms keep.
    """
    elements = part.tokens * (part.model.attention_hidden / part.tp + part.key_features)
    forward, backward = _norm_bytes(part)
    squares = part.tokens * 2.0 * 4.0
    phases: tuple[Phase, ...] = ("forward", "backward") if part.model.qk_norm == "all_heads" else ()
    return Operator(
        "query and key norms",
        moved_forward=elements * forward,
        moved_backward=elements * backward,
        inputs=joint_tensor(part),
        inside=(Tensor("queries and keys", elements * (_norm_kept(part) - _shared(part))),),
        launches=4.0,
        collectives=tuple(Collective("all_reduce", "tp", phase, squares) for phase in phases),
    )


def is_joint(part: Part) -> bool:
    """Whether queries and keys that were turned or normed stand beside one tensor of queries, keys and values.

    Where values are copied from it nothing refers to it any more, unless norms of queries and keys keep it.
    """
    turned = part.model.positions == "rotary" and not part.stack.copies_values
    return part.stack.joint_qkv and (turned or part.model.qk_norm != "none")


def _shared(part: Part) -> Number:
    """Bytes an element of what norms of queries and keys keep that are those of the one tensor behind the product.

    Norms that go through fp32 keep a copy of what is narrower.
    """
    if not is_joint(part):
        return 0.0
    return np.where(_keeps_input(part) | (np.asarray(part.element) == 4.0), part.element, 0.0)


def joint_tensor(part: Part) -> tuple[Tensor, ...]:
    """The one tensor of queries, keys and values that the first operator behind its product keeps, if there is one."""
    if not is_joint(part):
        return ()
    keys = part.model.attention_hidden / part.tp if part.stack.repeats_kv else part.key_features
    width = part.model.attention_hidden / part.tp + 2.0 * keys
    return (Tensor("queries, keys and values", part.tokens * width * part.element),)


def _norm_bytes(part: Part) -> tuple[Number, Number]:
    """Bytes that a norm moves an element, forward and backward."""
    forward, backward = (2.0, 3.0) if part.stack.fused_layernorm else (2.0, 4.0)
    eager_forward, eager_backward = EAGER_RMS_NORM_BYTES
    eager = is_eager(part) and part.model.norm == "rmsnorm"
    return (
        forward * part.moved_element + (eager_forward if eager else 0.0),
        backward * part.moved_element + (eager_backward if eager else 0.0),
    )


def _norm_kept(part: Part) -> Number:
    """Bytes that a norm keeps an element."""
    if part.model.norm != "rmsnorm":
        return part.element
    kept: dict[str, Number] = {"fused": part.element, "eager": 4.0 + part.element, "composite": 8.0}
    return kept[_rms_norm_of(part)]


def _keeps_input(part: Part) -> bool:
    """Whether a norm keeps its input as it is, and nothing else."""
    return part.model.norm != "rmsnorm" or _rms_norm_of(part) == "fused"


def _rms_norm_of(part: Part) -> Literal["fused", "eager", "composite"]:
    """How an RMS norm runs; PyTorch's own is fused on a GPU alone (torch/csrc, rms_norm of PyTorch 2.9 and later)."""
    if part.stack.rms_norm == "torch":
        return "composite" if part.on_cpu else "fused"
    return part.stack.rms_norm


def is_eager(part: Part) -> bool:
    """Whether norms and rotary angles run as PyTorch's eager operators on a GPU."""
    return part.stack.rms_norm in ("eager", "composite") and not part.stack.fused_layernorm and not part.on_cpu
