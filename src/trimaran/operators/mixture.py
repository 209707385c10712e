"""The block of a mixture of experts: router, exchange of tokens between ranks, experts' products, shared experts.

After Megatron-Core (megatron/core/transformer/moe/, commit d98e8a6). Each rank routes its own tokens (a slice of the
sequence under sequence parallelism), top_k copies of each go to the ranks of their experts, and come back summed. So
an EP group of e ranks with t tokens each puts t e k / E tokens before each of E experts, E / e of which a rank holds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np

from trimaran.nouns.model import Model
from trimaran.operators.casts import Floats, Number, Operands, cast_bytes
from trimaran.operators.mlp import FP32, WEIGHING_BYTES, activation_operator, mlp_products
from trimaran.operators.norm import is_eager, norm_after, norm_before
from trimaran.operators.operator import PHASES, Collective, CollectiveKind, Operator, Part, Product, Tensor
from trimaran.operators.pieces import as_cast, hidden_tensor, residual

# The operators that make the gradients of routed experts.
GROUPED = ("experts up", "experts down")
# Passes over the router's logits in fp32, an element of (tokens, experts): softmax or sigmoid, top-k, scatter of
# weights and of the map, sums for the balance loss (moe_utils.py, topk_routing_with_score_function; router.py).
ROUTER_PASSES = (8.0, 6.0)
# Operators that the host launches for routing: product, scores, top-k, two scatters, masks, balance loss.
ROUTER_LAUNCHES = 12.0
# Bytes a token's feature that the router's backward moves beside its products: the input is cast to fp32 for the
# weight's gradient, its own gradient is made in fp32 and cast back (moe_utils.py, lines 1425 to 1434).
ROUTER_BACKWARD_BYTES = 20.0
# Operators of a dispatch and of a combine (token_dispatcher.py, permutation.py of Transformer Engine): chosen experts
# and their weights, sizes, exchange, map of rows in three kernels, permutation, and what each of them allocates; back
# the permutation and the exchange.
DISPATCH_LAUNCHES, COMBINE_LAUNCHES = 18.0, 6.0
# A launch inside one call of C++: a product for each expert, which makes its descriptors and asks cuBLAS for a kernel
# anew (Transformer Engine 2.9, common/gemm/cublaslt_gemm.cu, lines 437 to 722 and 924 to 976), as an operator of Python
# does.
INNER_LAUNCH = 1.0


def mixture_block(part: Part) -> tuple[Operator, ...]:
    """Norm, router, shared experts, dispatch, experts' up, activation and down, combine, norm and residual."""
    model = part.model
    shared = model.shared_experts * model.moe_ffn_hidden
    width = model.moe_ffn_hidden / part.etp
    rows = part.in_blocks
    return (
        *norm_before(part, "experts norm"),
        _router(part),
        *(mlp_products(part, shared, (), "shared ") if shared else ()),
        *((_shared_gate(part),) if model.shared_gate else ()),
        _dispatch(part),
        _grouped(part, "experts up", width * (model.mlp_matrices - 1), float(model.hidden), "dispatched"),
        activation_operator(part, "experts activation", rows * width, rows),
        _grouped(part, "experts down", float(model.hidden), width, "activated"),
        _combine(part),
        *norm_after(part, "MLP output norm"),
        residual(part, "MLP residual"),
    )


def _router(part: Part) -> Operator:
    """Scores in fp32 of this rank's tokens; their input is what experts are sent and shared experts read."""
    model, tokens = part.model, part.own_tokens
    scores = tokens * model.experts
    forward, backward = ROUTER_PASSES
    experts, hidden = float(model.experts), float(model.hidden)
    return Operator(
        "router",
        forward=(Product(tokens, experts, hidden),),
        backward=(Product(tokens, hidden, experts), Product(hidden, experts, tokens)),
        moved_forward=scores * FP32 * forward,
        moved_backward=scores * FP32 * backward + tokens * hidden * ROUTER_BACKWARD_BYTES,
        inputs=(hidden_tensor(part, "normed hidden"),),
        inside=(Tensor("logits and weights", scores * 2.0 * FP32), Tensor("map", scores)),
        launches=ROUTER_LAUNCHES,
    )


def _shared_gate(part: Part) -> Operator:
    """A score of each token and its sigmoid, by which what the shared experts gave is multiplied and so kept.

    After Megatron-Core (moe/shared_experts.py), on each rank's own tokens.
    """
    tokens, hidden = part.own_tokens, float(part.model.hidden)
    elements = tokens * hidden
    return Operator(
        "shared gate",
        forward=(Product(tokens, 1.0, hidden),),
        backward=(Product(tokens, hidden, 1.0), Product(1.0, hidden, tokens)),
        moved_forward=elements * 2.0 * part.moved_element,
        moved_backward=elements * 4.0 * part.moved_element,
        inputs=(Tensor("shared results", elements * part.element),),
        launches=4.0,
    )


def _dispatch(part: Part) -> Operator:
    """Tokens are copied for each of their experts and sent there; backward their gradients come back and are summed."""
    arrival = _arrival(part, "dispatched tokens", part.permuting.there * part.load)
    return _exchange(part, "dispatch", ("dispatch", "combine"), DISPATCH_LAUNCHES, arrival)


def _combine(part: Part) -> Operator:
    """Experts' results are sent back and summed; backward their gradients are copied and sent.

    Where these are multiplied by tokens' weights they are kept for the weights' gradients.
    """
    arrival = _arrival(part, "combined tokens", part.permuting.back)
    sent = _exchange(part, "combine", ("combine", "dispatch"), COMBINE_LAUNCHES, arrival)
    if not part.stack.weighs_results:
        return sent
    elements = part.received * part.model.hidden
    forward, backward = WEIGHING_BYTES
    return replace(
        sent,
        inputs=(Tensor("experts' results", elements * part.element + part.received * FP32),),
        moved_forward=sent.moved_forward + elements * forward,
        moved_backward=sent.moved_backward + elements * backward,
    )


def _arrival(part: Part, name: str, tokens: Number) -> Tensor:
    """What an exchange leaves on a rank: so many tokens for each that it routes."""
    return Tensor(name, part.own_tokens * tokens * part.model.hidden * part.element)


def _exchange(
    part: Part, name: str, kinds: tuple[CollectiveKind, CollectiveKind], launches: float, arrival: Tensor
) -> Operator:
    """An exchange of one copy of this rank's tokens, `size`, as many times as the dispatcher sends it."""
    hidden = float(part.model.hidden)
    passes = part.permuting.passes + part.permuting.sorts * (part.local_experts > 1.0)
    moved = part.received * hidden * part.moved_element * passes
    one = part.own_tokens * part.load * hidden * part.element
    gathered = part.received * hidden * part.element
    return Operator(
        name,
        moved_forward=moved,
        moved_backward=moved,
        arrivals=(arrival,),
        launches=launches,
        collectives=(
            *(Collective(kind, "ep", phase, one) for kind, phase in zip(kinds, PHASES, strict=True)),
            *(Collective("all_gather", "etp", phase, gathered) for phase in PHASES),
        ),
    )


def exchange_bytes(part: Part) -> tuple[Number, Number]:
    """Bytes that the block holds at its fullest, forward and backward, beside what it keeps for the backward.

    Forward that is when what the experts gave comes back: copies on each side of the dispatch and of the combine are
    still referred to (moe_layer.py, custom_forward; Permuting says which), those with padding too. Backward the
    gradients of experts' results and of what is activated stand beside all that is kept.
    """
    model, permuting = part.model, part.permuting
    token = model.hidden * part.element
    copies = 1.0 + permuting.held + permuting.held_sorted * (part.local_experts > 1.0) + 2.0 * _padded(part)
    forward = part.received * copies * token + permuting.arriving * part.own_tokens * part.load * token
    activated = part.received * model.moe_ffn_hidden / part.etp
    if part.stack.fused_gelu or part.stack.lean_activation or part.stack.weighs_results:
        return forward, activated * part.element + part.received * token
    # weighing in fp32 has the gradient that both products are made of and their results at once
    return forward, activated * (part.element + 3.0 * FP32)


def _padded(part: Part) -> Number:
    """1 where tokens are copied with padding, for narrow products, and their results without: else 0.

    Rows of a narrow operand come in multiples; a router or a dispatcher that permutes may see to that.
    """
    if not part.stack.pads_experts:
        return 0.0
    is_cast, permutes = np.asarray(part.casts.element) > 0, np.asarray(part.permuting.passes) > 0
    return 1.0 * (is_cast & permutes & (part.local_experts > 1.0))


def _grouped(part: Part, name: str, n: Number, k: Number, kept: str) -> Operator:
    """Products of each expert that the rank holds with the tokens that it is sent."""
    experts, hidden = part.local_experts, float(part.model.hidden)
    blocks = np.asarray(part.block_rows) > 0
    rows = part.in_blocks
    each = rows / experts
    operands = Operands(n * k * experts, rows * k, rows * n, rows * k, rows * n)
    cast_forward, cast_backward = cast_bytes(part.casts, part.stack, operands, eager=is_eager(part))
    padding = 2.0 * (_padded(part) + blocks) * rows * hidden * part.moved_element
    # in fp32 generated code has results of its own, which are copied to their place
    copied = 2.0 * rows * part.moved_element * (blocks & (np.asarray(part.moved_element) == FP32))
    launched = 1.0 if part.stack.grouped_products == "one_kernel" else INNER_LAUNCH * experts
    return Operator(
        name,
        forward=(Product(each, n, k, experts),),
        backward=(Product(each, k, n, experts), Product(k, n, each, experts, ragged=True)),
        kernel="one_by_one" if part.stack.grouped_products == "one_by_one" else "linear",
        narrow=True,
        moved_forward=cast_forward + padding + copied * n,
        moved_backward=cast_backward + padding + copied * k,
        inputs=(as_cast(part, Tensor(kept, rows * k * part.element)),),
        launches=1.0 + launched,
    )


def share_met(model: Model, parts: Floats) -> Floats:
    """Chance that a token has an expert in one of so many equal parts of all experts.

    Its experts are any of the groups that it chose first, all as likely (DeepSeek-V3, arXiv 2412.19437, section 2.1.2:
    node-limited routing); a model without groups has one. A part lies within a group, or is of whole ones.
    """
    groups, chosen = max(model.expert_groups, 1), max(model.top_groups, 1)
    of_part = np.clip(np.rint(groups / parts), 1, groups).astype(np.int64)
    there = np.minimum(model.experts / groups, model.experts / parts / of_part)
    met = np.zeros(np.shape(parts))
    for count, chances in enumerate(_chosen_of_part(groups, chosen)):
        missed = np.ones(np.shape(parts))
        for earlier in range(model.top_k):
            left = chosen * model.experts / groups - earlier
            missed = missed * np.maximum(1.0 - count * there / left, 0.0)
        met = met + chances[of_part] * (1.0 - missed)
    return np.asarray(met)


@cache
def _chosen_of_part(groups: int, chosen: int) -> Floats:
    """Chance that so many of `chosen` groups are among those of a part, shape (chosen + 1, groups + 1).

    By how many groups the part is of: hypergeometric.
    """
    every = math.comb(groups, chosen)
    return np.array(
        [
            [math.comb(part, count) * math.comb(groups - part, chosen - count) / every for part in range(groups + 1)]
            for count in range(chosen + 1)
        ]
    )
