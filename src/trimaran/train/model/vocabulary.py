"""Embedding and output head with the vocabulary cut over TP ranks; logits are never gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trimaran.nouns.model import Model, padded_vocab
from trimaran.train.comm.device_kind import on_gpu
from trimaran.train.comm.group import Group
from trimaran.train.comm.sequence_share import SequenceShare
from trimaran.train.model.autograd import apply
from trimaran.train.model.positions import positions_in_documents
from trimaran.train.model.product import add_product, linear, product
from trimaran.train.model.tensor_parallel import sequence_slice, sum_backward, sum_forward
from trimaran.train.model.weight import DeclaredModule, Weight, WeightSpec

# Tokens whose logits exist at a time: enough for the products to run at full rate, few enough that logits do not
# set the memory peak.
CHUNK_TOKENS = 512

# A GPU needs more, to keep all its processors busy and to add to the gradients of the matrix seldom.
GPU_CHUNK_TOKENS = 4096

# A softmax works on as many fp32 bytes of these logits at a time, per core, as a cache holds: 5% of a bf16 step.
BLOCK_BYTES = 1 << 20

EMBEDDING_NAME = "embedding.tokens"


def embedding_spec(model: Model, tp: int, *, tied_copy: bool = False, drawn_as: str | None = None) -> WeightSpec:
    """The spec of a (vocabulary, hidden) matrix, padded to 128 x TP and cut by rows."""
    return WeightSpec(
        (padded_vocab(model.vocab, tp), model.hidden),
        shard_dim=0,
        real_rows=model.vocab,
        tied_copy=tied_copy,
        drawn_as=drawn_as,
    )


def _local_rows(tokens: Tensor, first_row: int, rows: int) -> tuple[Tensor, Tensor]:
    """The row of each token in a part of the vocabulary, 0 where it is not there, and whether it is."""
    local = tokens - first_row
    is_local = (local >= 0) & (local < rows)
    return local.masked_fill(~is_local, 0), is_local


class _Lookup(torch.autograd.Function):
    """Rows of this rank's part of the vocabulary; zero for the tokens of other TP ranks."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Weight, group: Group) -> Tensor:
        ctx.weight = weight
        if group.size == 1:
            ctx.save_for_backward(tokens, None)
            return functional.embedding(tokens, weight)
        rows, is_local = _local_rows(tokens, group.index * weight.shape[0], weight.shape[0])
        ctx.save_for_backward(rows, is_local)
        return functional.embedding(rows, weight).mul_(is_local.unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        rows, is_local = ctx.saved_tensors
        grad = ctx.weight.main_grad
        dy = dy if is_local is None else dy * is_local.unsqueeze(-1)
        grad.index_add_(0, rows.reshape(-1), dy.reshape(-1, dy.shape[-1]).to(grad.dtype))
        return None, None, None


class Embedding(DeclaredModule):
    """Token embedding, cut over TP by rows of the vocabulary, plus learned positions where the model has them.

    Where the model scales it, it is multiplied by the square root of hidden, rounded as Gemma rounds it.
    """

    tokens: Weight
    positions: Weight | None

    def __init__(self, model: Model, group: Group, sequence: SequenceShare) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence
        self.scale = model.hidden**0.5 if model.scaled_embedding else None
        self.declare("tokens", embedding_spec(model, group.size), group.size)
        learned = WeightSpec((model.max_positions, model.hidden)) if model.positions == "learned" else None
        self.declare("positions", learned)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """(b, s) token ids -> (b, s, h), or this rank's slice of the sequence of it.

        Positions count from the beginning of each document where `documents` are given.
        """
        x = sum_forward(apply(_Lookup, tokens, self.tokens, self.group), self.group)
        if self.scale is not None:
            x = x * torch.tensor(self.scale, dtype=x.dtype, device=x.device)
        if self.positions is None:
            return x
        if documents is None:
            whole = self.positions[: tokens.shape[1] * self.sequence.group.size]
            return x + sequence_slice(self.sequence.of(whole, 0), self.group, 0)
        positions = sequence_slice(self.sequence.of(positions_in_documents(documents), 1), self.group, 1)
        return x + functional.embedding(positions, self.positions)


@dataclass(frozen=True)
class _Part:
    """What the loss of some tokens is made of beside their logits.

    Of this rank's rows of the vocabulary, which begin at `first_row`, those from `real_rows` on are padding.
    """

    targets: Tensor
    scale: float
    real_rows: int
    first_row: int
    group: Group


def _loss_and_gradient(logits: Tensor, part: _Part) -> Tensor:
    """Sum of the cross-entropies of (tokens, V / TP) logits; the logits become scale x (softmax - target).

    TP ranks exchange two numbers per token: the log of the local sum of exponentials and the target's logit.
    """
    scale, group = part.scale, part.group
    logits[:, part.real_rows :] = -torch.inf
    columns, is_local = _local_rows(part.targets, part.first_row, logits.shape[1])
    columns = columns.unsqueeze(1)
    at_target = logits.gather(1, columns).squeeze(1).float().masked_fill(~is_local, 0.0)
    exponentials = logits.float()
    largest = exponentials.amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    exponentials.sub_(largest).exp_()
    log_sum = (largest + exponentials.sum(1, keepdim=True).log_()).squeeze(1)
    if group.size > 1:
        by_rank = torch.stack(group.all_gather(torch.stack((log_sum, at_target))))
        log_sum, at_target = torch.logsumexp(by_rank[:, 0], 0), by_rank[:, 1].sum(0)
    exponentials.mul_((largest - log_sum.unsqueeze(1)).exp_().mul_(scale))
    exponentials.scatter_add_(1, columns, is_local.unsqueeze(1).to(exponentials.dtype).mul_(-scale))
    if exponentials is not logits:
        logits.copy_(exponentials)
    return (log_sum - at_target).sum()


def _capped_loss_and_gradient(logits: Tensor, part: _Part, cap: float) -> Tensor:
    """The same of logits that are kept within `cap` by tanh; they become the gradient of what they were before."""
    tanh = logits.div_(cap).tanh_()
    capped = tanh * cap
    loss = _loss_and_gradient(capped, part)
    tanh.square_().neg_().add_(1.0).mul_(capped)
    return loss


class _HeadLoss(torch.autograd.Function):
    """Sum of the cross-entropies of x W^T against the targets, times `scale`.

    The gradient is computed along with the loss, chunk by chunk: it overwrites the logits, and neither outlives its
    chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Weight, targets: Tensor, scale: float, model: Model, group: Group
    ) -> Tensor:
        vocab, cap = model.vocab, model.logit_softcap
        rows = weight.shape[0]
        first_row = group.index * rows
        real_rows = max(0, min(vocab - first_row, rows))
        chunk_tokens = block_tokens = GPU_CHUNK_TOKENS if on_gpu(x.device) else CHUNK_TOKENS
        if group.size == 1 and not on_gpu(x.device):
            # TP ranks exchange their sums once per chunk; a rank alone goes block by block, within its cache
            block_tokens = max(1, BLOCK_BYTES * torch.get_num_threads() // (4 * rows))
        dx = torch.empty_like(x) if x.requires_grad else None
        losses = []
        for begin in range(0, len(x), chunk_tokens):
            chunk = slice(begin, begin + chunk_tokens)
            logits = linear(x[chunk], weight)
            for at in range(0, len(logits), block_tokens):
                block, wanted = logits[at : at + block_tokens], targets[begin + at : begin + at + block_tokens]
                part = _Part(wanted[: len(block)], scale, real_rows, first_row, group)
                losses.append(_capped_loss_and_gradient(block, part, cap) if cap else _loss_and_gradient(block, part))
            if dx is not None:
                product(logits, weight, out=dx[chunk])
                add_product(weight.main_grad, logits, x[chunk])
            # two chunks' would exist while those of the next are made
            del logits, block
        ctx.dx = dx
        return torch.stack(losses).sum() * scale

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        # every backward begins at the loss, so dloss is 1, and the weight's gradient was added in the forward
        dx, ctx.dx = ctx.dx, None  # the loss, which outlives its backward, would hold it
        return dx, None, None, None, None, None


class Head(DeclaredModule):
    """Output matrix and loss. Tied to an embedding on the same rank, it borrows the embedding's weight."""

    weight: Weight

    def __init__(self, model: Model, group: Group, *, embedding: Embedding | None) -> None:
        super().__init__()
        self.group = group
        self.model = model
        # a list hides the borrowed module from the registry, where it would be counted twice
        self._borrowed = [embedding] if model.tied_embedding and embedding is not None else []
        if not self._borrowed:
            tied = model.tied_embedding
            drawn_as = EMBEDDING_NAME if tied else None
            self.declare("weight", embedding_spec(model, group.size, tied_copy=tied, drawn_as=drawn_as), group.size)

    @property
    def _matrix(self) -> Weight:
        return self._borrowed[0].tokens if self._borrowed else self.weight

    @property
    def borrows(self) -> bool:
        """Whether the matrix is the embedding's."""
        return bool(self._borrowed)

    def logits(self, x: Tensor) -> Tensor:
        """(.., h) -> (.., vocabulary), on a TP of 1."""
        assert self.group.size == 1, "TP ranks never gather their logits"
        logits = functional.linear(x, self._matrix[: self.model.vocab])
        cap = self.model.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def forward(self, x: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Cross-entropy of (b, s, h) against (b, s), summed over tokens and multiplied by `scale`."""
        flat = sum_backward(x, self.group).reshape(-1, x.shape[-1])
        args = (flat, self._matrix, targets.reshape(-1), scale, self.model, self.group)
        return apply(_HeadLoss, *args)
