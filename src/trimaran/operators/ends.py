"""The operators at the ends of the model: embedding on the first stage, head and loss on the last."""

from __future__ import annotations

import numpy as np

from trimaran.operators.casts import Number
from trimaran.operators.operator import SOFTCAP_PASSES, Collective, Operator, Part, Product, Tensor
from trimaran.operators.pieces import mask_bytes


def embedding_operator(part: Part) -> Operator:
    """Lookup, positions and dropout forward, and the scatter of the gradient backward; where scaled, a pass each.

    Its dropout's mask and what its norm reads stay for the backward, and no recompute makes them again: checkpoints
    begin behind it (Megatron-LM core_v0.8.0, megatron/core/models/common/embeddings/language_model_embedding.py, and
    DeepSpeed v0.16.9, deepspeed/runtime/pipe/module.py, _is_checkpointable).
    """
    moved = part.tokens * part.model.hidden * (6.0 * part.moved_element + 8.0)
    scaling = part.tokens * part.model.hidden * 2.0 * part.moved_element if part.model.scaled_embedding else 0.0
    return Operator(
        "embedding",
        moved_forward=moved / 3.0 + scaling,
        moved_backward=moved * 2.0 / 3.0 + scaling,
        inputs=(Tensor("embedded", part.hidden_elements * part.element),) if part.model.embedding_norm else (),
        inside=(Tensor("dropout mask", part.hidden_elements * mask_bytes(part)),) if part.stack.dropout else (),
        collectives=(Collective("all_reduce", "tp", "forward", part.message),),
    )


def head_operator(part: Part, vocab: Number) -> Operator:
    """Logits over `vocab` words and cross-entropy; a classifier has neither, and its TP ranks sum all the same.

    An fp32 loss casts to fp32, takes maximum, exponential and sum, and casts its gradient back: it keeps so many fp32
    copies (`loss_copies`, or `loss_copies_over_tp`) beside the 16-bit logits, where those are not let go before. One
    that takes the logits as they are keeps them and their gradient. A loss made in chunks of tokens keeps one chunk.
    """
    model, stack = part.model, part.stack
    collectives = (Collective("all_reduce", "tp", "backward", part.message),)
    if model.head == "classifier":
        return Operator("head", collectives=collectives)
    tokens, h, v = part.tokens, float(model.hidden), vocab / part.tp
    elements = tokens * v
    element = part.moved_element
    capped_forward, capped_backward, capped = SOFTCAP_PASSES if model.logit_softcap else (0.0, 0.0, 0.0)
    forward, backward = (element + 16.0, element + 8.0) if stack.fp32_loss else (2.0 * element, 2.0 * element)
    narrow = np.where(np.asarray(part.element) < 4.0, part.element, 0.0)
    alone, shared = stack.loss_copies, stack.loss_copies_over_tp or stack.loss_copies
    loss_copies = np.where(np.asarray(part.tp) > 1, shared, alone)
    copies = 4.0 * loss_copies + (0.0 if stack.frees_logits else narrow) if stack.fp32_loss else 2.0 * part.element
    copies = copies + capped * np.asarray(part.element)
    chunk = (stack.loss_chunk_cpu_tokens if part.on_cpu else stack.loss_chunk_gpu_tokens) or np.inf
    return Operator(
        "head",
        forward=(Product(tokens, v, h),),
        backward=(Product(tokens, h, v), Product(h, v, tokens)),
        moved_forward=elements * (forward + capped_forward * element),
        moved_backward=elements * (backward + capped_backward * element),
        inside=(Tensor("logits", np.minimum(tokens, chunk) * v * copies),),
        collectives=collectives,
    )
