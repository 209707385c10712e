"""SequenceShare: which tokens of each sequence a rank of context parallelism holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.nouns.stack import ContextParallelKind
from trimaran.train.comm.group import Group


@dataclass(frozen=True)
class SequenceShare:
    """The ranks that share every sequence, and how attention brings them together.

    Under a causal mask late tokens have more to attend to. So of 2 x size equal chunks rank i holds those numbered i
    and 2 x size - 1 - i, in this order, and each rank computes as much. Where heads are dealt out in place of tokens
    (Ulysses) a rank attends from all tokens, and holds one run of them.
    """

    group: Group
    kind: ContextParallelKind = "ring"

    @property
    def deals_heads(self) -> bool:
        """Whether a rank attends with a part of the heads over whole sequences."""
        return self.group.size > 1 and self.kind == "ulysses"

    @property
    def shares_attention(self) -> bool:
        """Whether the keys that a rank's tokens attend to lie on other ranks too."""
        return self.group.size > 1 and self.kind != "ulysses"

    def of(self, whole: Tensor, dim: int, index: int | None = None) -> Tensor:
        """This rank's part, or that of rank `index`, of a tensor with whole sequences in `dim`."""
        size, index = self.group.size, self.group.index if index is None else index
        if size == 1:
            return whole
        if self.kind == "ulysses":
            return whole.chunk(size, dim)[index]
        chunks = whole.chunk(2 * size, dim)
        return torch.cat((chunks[index], chunks[2 * size - 1 - index]), dim)

    def positions(self, tokens: int, device: torch.device, index: int | None = None) -> Tensor:
        """Places in the sequence of the `tokens` that this rank, or rank `index`, holds of it."""
        return self.of(torch.arange(tokens * self.group.size, device=device), 0, index)
