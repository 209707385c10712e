"""How positions and documents enter attention: rotary angles, ALiBi slopes and the mask."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trimaran.nouns.attention import RotaryScaling, RotaryYarn
from trimaran.nouns.model import Model
from trimaran.train.comm.group import Group
from trimaran.train.comm.sequence_share import SequenceShare

# What is added to the scores of a block, or None where all its pairs count: of a slice of this rank's queries over a
# slice of the keys of another rank, whose number comes first.
BlockMask = Callable[[int, slice, slice], Tensor | None]


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


def rotary_frequencies(turned: int, theta: float, scaling: RotaryScaling | None) -> Tensor:
    """Radians per position for each pair of the turned features, (turned / 2,), in fp32 (Su et al., arXiv 2104.09864).

    With `scaling`, wavelengths longer than the training context / `low_freq_factor` are stretched by `factor`,
    those shorter than context / `high_freq_factor` kept, and those between blended (Llama 3.1, arXiv 2407.21783).
    """
    frequencies = 1.0 / theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    if scaling is None:
        return frequencies
    context = scaling.original_max_positions
    turns = context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def yarn_frequencies(turned: int, theta: float, yarn: RotaryYarn) -> Tensor:
    """The same as YaRN stretches them (Peng et al., arXiv 2309.00071, section 3.2).

    A feature turns `original_max_positions` / wavelength times within the original context. Between the features
    that turn `beta_fast` and `beta_slow` times, whole ones where `truncate` says so, the stretch grows by a ramp.
    """
    frequencies = rotary_frequencies(turned, theta, None)

    def feature(turns: float) -> float:
        return turned * math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = feature(yarn.beta_fast), feature(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, turned - 1)
    wide = last - first or 0.001
    stretched = ((torch.arange(turned // 2, dtype=torch.float32) - first) / wide).clamp(0.0, 1.0)
    return frequencies * (1.0 - stretched) + frequencies / yarn.factor * stretched


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Features (i, i + n/2) of the first n of (b, heads, s, d) turned by their angle, as Hugging Face's Llama pairs.

    The tables of the angles are (s, n / 2).
    """
    half = cos.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class Positions:
    """Positions as the attention of a stage's layers uses them; all layers share tables that are made once.

    Rotary angles and ALiBi depend on distances alone, so they are the same within a document wherever it begins.
    `group` shares the heads, and `sequence` the tokens.
    """

    def __init__(self, model: Model, group: Group, sequence: SequenceShare) -> None:
        self._model, self.sequence = model, sequence
        # latent attention turns what heads share before it deals them out
        deals_turned = sequence.deals_heads and model.latent_attention is not None
        self._turns_own_tokens = sequence.shares_attention or deals_turned
        heads = model.heads // group.size
        first = group.index * heads
        if sequence.deals_heads:
            heads //= sequence.group.size
            first += sequence.group.index * heads
        self._slopes = alibi_slopes(model.heads)[first : first + heads] if model.positions == "alibi" else None
        self._angles: tuple[Tensor, Tensor] | None = None
        self._bias: Tensor | None = None
        self._mask_of: tuple[Tensor, Tensor] | None = None
        self._block_masks: tuple[Tensor | None, dict[tuple[int, int], Tensor]] = None, {}

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (b, heads, s, d), turned by their positions where the model is rotary.

        Of latent attention they are the features that are turned alone.
        """
        model = self._model
        if model.positions != "rotary":
            return q, k
        length, shared = q.shape[2], self._turns_own_tokens
        if self._angles is None or len(self._angles[0]) < length or (shared and len(self._angles[0]) > length):
            yarn, grown = model.rotary_yarn, 1.0
            frequencies = rotary_frequencies(model.rotary_dim, model.rotary_theta, model.rotary_scaling)
            if yarn is not None:
                frequencies = yarn_frequencies(model.rotary_dim, model.rotary_theta, yarn)
                grown = yarn.attention_factor
            cpu = torch.device("cpu")
            places = self.sequence.positions(length, cpu) if shared else torch.arange(length)
            angles = torch.outer(places.float(), frequencies)
            self._angles = (angles.cos() * grown).to(q), (angles.sin() * grown).to(q)
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

    def block_mask(self, q: Tensor, documents: Tensor | None, window: int) -> BlockMask:
        """The same of blocks of scores, of queries on this rank over keys on another one.

        The queries are (b, heads, s / CP, d), `documents` those of whole sequences. Of the keys those of the last
        `window` tokens count, all where it is 0.
        """
        if window >= q.shape[2] * self.sequence.group.size:
            window = 0

        def mask(source: int, rows: slice, columns: slice) -> Tensor | None:
            if self._slopes is None and documents is None and not window:
                return None
            if self._block_masks[0] is not documents:
                self._block_masks = documents, {}
            masks = self._block_masks[1]
            key = source, window
            if key not in masks or masks[key].dtype != q.dtype:
                masks[key] = self._masked_block(q, documents, source, rows, columns, window)
            return masks[key]

        return mask

    def _masked_block(
        self, q: Tensor, documents: Tensor | None, source: int, rows: slice, columns: slice, window: int
    ) -> Tensor:
        """(b or 1, heads or 1, queries, keys) of what is added to a block's scores; -inf after the query."""
        tokens, device = q.shape[2], q.device
        queries = self.sequence.positions(tokens, device)[rows]
        keys = self.sequence.positions(tokens, device, source)[columns]
        distance = (keys - queries.unsqueeze(1)).float().view(1, 1, len(queries), len(keys))
        slopes = torch.tensor(self._slopes or [0.0], device=device)
        bias = (slopes.view(1, -1, 1, 1) * distance).masked_fill_(distance > 0, -torch.inf)
        if window:
            bias.masked_fill_(distance <= -window, -torch.inf)
        if documents is not None:
            of_queries = self.sequence.of(documents, 1)[:, rows]
            of_keys = self.sequence.of(documents, 1, source)[:, columns]
            same_document = of_queries.unsqueeze(2) == of_keys.unsqueeze(1)
            bias = torch.where(same_document.unsqueeze(1), bias, -torch.inf)
        return bias.to(q.dtype)

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
