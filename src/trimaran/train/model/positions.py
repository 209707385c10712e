"""How positions and documents enter attention: rotary angles, ALiBi slopes and the mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trimaran.nouns.model import Model, RotaryScaling
from trimaran.train.comm.group import Group


def documents_of(tokens: Tensor, end_of_document: int) -> Tensor:
    """Number of the document that each of (b, s) tokens belongs to, counted from 0 in every row.

    The end-of-document token is the last of its document.
    """
    ends = tokens == end_of_document
    return ends.cumsum(1) - ends.long()


def positions_in_documents(documents: Tensor) -> Tensor:
    """Position of each token within its document's part of the row, (b, s), from 0."""
    positions = torch.arange(documents.shape[1], device=documents.device)
    return positions - torch.searchsorted(documents, documents)


def alibi_slopes(heads: int) -> list[float]:
    """Slope of every head (Press et al., arXiv 2108.12409).

    2^(-8 i / n) for n heads, i = 1 .. n, n a power of two; other counts take those of the power of two below,
    and then every second one of the power of two above.
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    return slopes + [2.0 ** (-4.0 * i / below) for i in range(1, 2 * (heads - below), 2)]


def rotary_frequencies(head_dim: int, theta: float, scaling: RotaryScaling | None) -> Tensor:
    """Radians per position for each pair of features, (head_dim / 2,), in fp32 (Su et al., arXiv 2104.09864).

    With `scaling`, wavelengths longer than the training context / `low_freq_factor` are stretched by `factor`,
    those shorter than context / `high_freq_factor` kept, and those between blended (Llama 3.1, arXiv 2407.21783).
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    context = scaling.original_max_positions
    turns = context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Features (i, i + d/2) of (b, heads, s, d) turned by their angle, as Hugging Face's Llama pairs them."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Positions:
    """Positions as the attention of a stage's layers uses them; all layers share tables that are made once.

    Rotary angles and ALiBi depend on distances alone, so they are the same within a document wherever it begins.
    """

    def __init__(self, model: Model, group: Group) -> None:
        self._model = model
        heads = model.heads // group.size
        local_heads = slice(group.index * heads, (group.index + 1) * heads)
        self._slopes = alibi_slopes(model.heads)[local_heads] if model.positions == "alibi" else None
        self._angles: tuple[Tensor, Tensor] | None = None
        self._bias: Tensor | None = None
        self._mask_of: tuple[Tensor, Tensor] | None = None

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (b, heads, s, d), turned by their positions where the model is rotary."""
        model = self._model
        if model.positions != "rotary":
            return q, k
        length = q.shape[2]
        if self._angles is None or len(self._angles[0]) < length:
            frequencies = rotary_frequencies(model.head_dim, model.rotary_theta, model.rotary_scaling)
            angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
            self._angles = angles.cos().to(q), angles.sin().to(q)
        cos, sin = (table[:length] for table in self._angles)
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    def mask(self, q: Tensor, documents: Tensor | None) -> Tensor | None:
        """What is added to the scores of (b, heads, s, d) queries, or which of them count; None for plain causal.

        With ALiBi: slope x (key's position - query's position). With `documents` (b, s) tokens attend within their
        document alone. The result broadcasts over (b, heads, s, s).
        """
        bias = None if self._slopes is None else self._alibi(q)
        if documents is None:
            return bias
        # the layers of a stage ask in turn for the mask of the same micro-batch
        if self._mask_of is None or self._mask_of[0] is not documents:
            same_document = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril_().unsqueeze(1)
            mask = same_document if bias is None else torch.where(same_document, bias, -torch.inf)
            self._mask_of = documents, mask
        return self._mask_of[1]

    def _alibi(self, q: Tensor) -> Tensor:
        """(1, this rank's heads, s, s) of slope x distance; -inf above the diagonal."""
        length = q.shape[2]
        if self._bias is None or self._bias.shape[2] != length:
            positions = torch.arange(length, dtype=torch.float32, device=q.device)
            distance = positions - positions.unsqueeze(1)
            distance.masked_fill_(distance > 0, -torch.inf)
            slopes = torch.tensor(self._slopes, device=q.device)
            self._bias = (slopes.view(-1, 1, 1) * distance).to(q.dtype).unsqueeze(0)
        return self._bias
