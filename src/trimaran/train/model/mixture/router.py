"""The router of a mixture: which experts each token goes to, with what weight, and what evens out their load.

Losses that even out the load are added to the gradient of the tokens' weights, where they do not change what the
layer gives. All of them are sums over tokens or over single sequences, so that they are the same on every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimaran.nouns.model import Model
from trimaran.train.comm.group import Group
from trimaran.train.model.autograd import apply
from trimaran.train.model.product import add_product, linear, product
from trimaran.train.model.weight import DeclaredModule, Weight, WeightSpec

# Keeps a token's weights finite where all scores of its experts are 0, as DeepSeek-V3's published code has it.
LEAST_SUM = 1e-20


@dataclass(frozen=True)
class Routing:
    """The `experts` (tokens, top_k) that each token goes to, and its `weights` for them in fp32."""

    experts: Tensor
    weights: Tensor


class Balance:
    """What the routers of a rank count in a step, and the losses by which they even out experts' load.

    `balance_loss` is the weight of the sum over sequences of E / (k s) sum_i n_i P_i: n_i of the sequence's s tokens
    chose expert i, whose mean share of their scores is P_i (Fedus et al., arXiv 2101.03961, eq. 4, of one sequence as
    in DeepSeek-V3, arXiv 2412.19437, eq. 17); it is 1 where the load is even. `z_loss` is that of the mean square of
    the logarithm of the sum of exponentials of a token's logits (Zoph et al., arXiv 2202.08906, eq. 5).

    `loads` (layers, experts) are tokens that were sent to each expert of all layers, `losses` (2,) the two sums over
    this rank's sequences and tokens; layers of other ranks stay at zero.
    """

    def __init__(
        self, model: Model, balance_loss: float, z_loss: float, sharers: tuple[Group, ...], device: torch.device
    ) -> None:
        self.balance_loss, self.z_loss = balance_loss, z_loss
        self._sharers = sharers
        self.loads = torch.zeros(model.layers, model.experts, dtype=torch.float64, device=device)
        self.losses = torch.zeros(2, dtype=torch.float64, device=device)
        self._token_scale = 0.0

    def begin(self, token_scale: float) -> None:
        """A step begins, by whose `token_scale` the loss of each token is multiplied."""
        self._token_scale = token_scale
        self.loads.zero_()
        self.losses.zero_()

    def count(self, layer: int, routing: Routing) -> None:
        """Count the tokens that a layer's experts are sent."""
        self.loads[layer] += torch.bincount(routing.experts.view(-1), minlength=self.loads.shape[1])

    def charge(self, routing: Routing, logits: Tensor, scores: Tensor, sequences: int) -> Routing:
        """The routing, whose weights pass on the gradients of the two losses; (tokens, experts) of `sequences`."""
        weights = routing.weights
        if self.balance_loss:
            loss = self._uneven(routing.experts, scores, sequences)
            self.losses[0] += loss.detach()
            per_sequence = self._token_scale * self._tokens_of(len(scores) // sequences)
            weights = apply(_WithLoss, weights, loss * (self.balance_loss * per_sequence))
        if self.z_loss:
            loss = torch.logsumexp(logits, 1).square().sum()
            self.losses[1] += loss.detach()
            weights = apply(_WithLoss, weights, loss * (self.z_loss * self._token_scale))
        return Routing(routing.experts, weights)

    def _tokens_of(self, local_tokens: int) -> int:
        """Tokens of a sequence, of which this rank has so many."""
        for group in self._sharers:
            local_tokens *= group.size
        return local_tokens

    def _uneven(self, experts: Tensor, scores: Tensor, sequences: int) -> Tensor:
        """This rank's share of the sum over its sequences; each rank that shares them has a part of their tokens."""
        count, top_k = scores.shape[1], experts.shape[1]
        tokens = self._tokens_of(len(scores) // sequences)
        chosen = scores.new_zeros(sequences, count)
        of_sequence = experts.view(sequences, -1)
        chosen.scatter_add_(1, of_sequence, torch.ones_like(of_sequence, dtype=scores.dtype))
        for group in self._sharers:
            group.all_reduce(chosen)  # nothing where a group is this rank alone
        shares = (scores / scores.sum(1, keepdim=True)).view(sequences, -1, count).sum(1)
        return (chosen * shares).sum() * (count / (top_k * tokens * tokens))


class _WithLoss(torch.autograd.Function):
    """Identity, whose backward is one of a further loss too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, torch.ones((), dtype=ctx.dtype, device=dy.device)


class _Logits(torch.autograd.Function):
    """x W^T in fp32, of x in any precision: in 16 bit near scores would often be the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach()  # what is put off would keep the graph behind it
        weight: Weight = ctx.weight
        weight.accumulate(lambda: add_product(weight.main_grad, dy, x.float()))
        return product(dy, weight.float()).to(x.dtype), None


class Router(DeclaredModule):
    """Scores of all experts, and the choice of the top_k best (`nouns.dispatcher` says how a model's router does so).

    TP ranks each route tokens of their own, so that the matrix, which all of them hold, sees a slice of them.
    """

    weight: Weight
    bias: Weight | None
    balance: Balance | None = None

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.layer, self.top_k, self.settings = layer, model.top_k, model.router
        self.groups, self.top_groups = model.expert_groups, model.top_groups
        self.declare("weight", WeightSpec((model.experts, model.hidden)))
        # no gradient reaches it: the trainer moves it against the load
        self.declare("bias", WeightSpec((model.experts,), init="zeros") if model.router.bias else None)

    def forward(self, x: Tensor) -> Routing:
        """(b, s, h) of this rank's tokens -> their experts and weights, (b s, top_k)."""
        logits = apply(_Logits, x.reshape(-1, x.shape[-1]), self.weight)
        scores = logits.softmax(1) if self.settings.scores == "softmax" else logits.sigmoid()
        experts = self._best(scores.detach())
        weights = scores.gather(1, experts)
        if self.settings.normalised:
            weights = weights / (weights.sum(1, keepdim=True) + LEAST_SUM)
        if self.settings.scale != 1.0:
            weights = weights * self.settings.scale
        routing = Routing(experts, weights)
        # a forward without gradients is a validation's, or one that recompute is to make again
        if self.balance is None or not torch.is_grad_enabled():
            return routing
        self.balance.count(self.layer, routing)
        return self.balance.charge(routing, logits, scores, x.shape[0])

    def _best(self, scores: Tensor) -> Tensor:
        """The experts of the best scores, of the best groups' alone where there are groups."""
        choice = scores if self.bias is None else scores + self.bias.detach()
        if self.groups > 1:
            by_group = choice.view(len(choice), self.groups, -1)
            of_group = by_group.topk(self.settings.group_best, 2).values.sum(2)
            best = of_group.topk(self.top_groups, 1).indices
            outside = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best, False)
            choice = by_group.masked_fill(outside.unsqueeze(2), -torch.inf).view_as(choice)
        return choice.topk(self.top_k, 1).indices
