"""Operator: the products, passes over memory, kept tensors and collectives of one kernel or a few that run as one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trimaran.nouns.attention import LatentAttention
from trimaran.nouns.model import Model
from trimaran.nouns.precision import PRECISIONS
from trimaran.nouns.stack import Stack
from trimaran.operators.casts import UNCAST, Casts, Number

Bools = NDArray[np.bool_]
# linear: by weights, those of a batch in one kernel or beside each other; one_by_one: of a batch one after the other;
# batched: one product a head; flash: scores are never written, and the masked half is skipped.
Kernel = Literal["linear", "one_by_one", "batched", "flash"]
BY_WEIGHTS: tuple[Kernel, ...] = ("linear", "one_by_one")
CollectiveKind = Literal["all_reduce", "all_gather", "dispatch", "combine", "ring", "all_to_all"]
# recompute: what a selective recompute that keeps results has its ranks do; a full one does the forward's again
Phase = Literal["forward", "backward", "recompute"]
PHASES: tuple[Phase, ...] = ("forward", "backward")
# A soft cap of what lies in memory divides, takes tanh and multiplies, in PyTorch's eager operators: passes over it
# forward and backward, and copies kept (of tanh's result).
SOFTCAP_PASSES = (6.0, 7.0, 1.0)


@dataclass(frozen=True)
class Product:
    """`batch` matrix products of m x k times k x n.

    Of a `ragged` one k may be any number: its operands lie in memory along m and n.
    """

    m: Number
    n: Number
    k: Number
    batch: Number = 1.0
    ragged: bool = False

    @property
    def operations(self) -> Number:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k * self.batch


@dataclass(frozen=True)
class Tensor:
    """A tensor that is kept from the forward for the backward, and its bytes on one rank.

    `copied` is the share of it that the operator which keeps it has made anew: it stays where what it is made of goes.
    """

    name: str
    size: Number
    copied: Number = 0.0


@dataclass(frozen=True)
class Collective:
    """What an operator has the ranks along `axis` do in one phase, on `size` bytes."""

    kind: CollectiveKind
    axis: str
    phase: Phase
    size: Number


@dataclass(frozen=True)
class Operator:
    """What one kernel does for one micro-batch on one rank.

    `moved_forward` and `moved_backward` are bytes that memory-bound kernels read and write. `inputs` are kept for the
    backward even where the operator itself is computed again; `inside` is what it then makes anew. `outputs` are what
    its products leave and `arrivals` what its collectives do forward, either of which a recompute by operator may keep.
    `launches` counts the operators that the host launches forward, `drawn` the random numbers. Products of a `narrow`
    one are in the precision's narrow format, if it has one.
    """

    name: str
    forward: tuple[Product, ...] = ()
    backward: tuple[Product, ...] = ()
    kernel: Kernel = "linear"
    narrow: bool = False
    moved_forward: Number = 0.0
    moved_backward: Number = 0.0
    inputs: tuple[Tensor, ...] = ()
    inside: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    arrivals: tuple[Tensor, ...] = ()
    launches: Number = 0.0
    drawn: Number = 0.0
    collectives: tuple[Collective, ...] = ()

    def made_again(self, stack: Stack) -> Number:
        """Share of the operator's forward that the stack's selective recompute runs again."""
        keeps = stack.selective_keeps
        if not keeps:
            return float(self.name in stack.selective)
        if not self.outputs:
            return 1.0
        sizes = {tensor.name: np.asarray(tensor.size, dtype=np.float64) for tensor in self.outputs}
        kept = [size for name, size in sizes.items() if name in keeps]
        return np.asarray(1.0 - np.sum(kept, axis=0) / np.sum(list(sizes.values()), axis=0))


@dataclass(frozen=True)
class Permuting:
    """Passes that permute copies of tokens for their experts, and copies that stay meanwhile; see nouns.dispatcher.

    `arriving` are tokens that are held before they are copied for their experts, over those that a rank routes.
    `there` and `back` are those that an exchange brings to a rank, and that another one brings back, likewise.
    """

    passes: Number = 2.0
    sorts: Number = 0.0
    held: Number = 0.0
    held_sorted: Number = 0.0
    arriving: Number = 0.0
    there: Number = 0.0
    back: Number = 0.0


@dataclass(frozen=True)
class Context:
    """How ranks that share a sequence let each query meet all keys: `ranks` of them, and 1 where it is by each way.

    By a `ring`, by an all-gather (`gathers`), or by dealing out heads in place of tokens (`heads`, Ulysses). Where none
    is 1, keys and values come for nothing, as bounds have it.
    """

    ranks: Number
    ring: Number
    gathers: Number
    heads: Number


@dataclass(frozen=True)
class Part:
    """One rank's part of one micro-batch, over n distinct shapes: arrays of shape (n,), or plain numbers.

    `element` is the bytes of an element that is kept, `moved_element` of one that passes through memory: a CPU makes
    fp16 products in fp32. Experts are spread over `ep` ranks and each cut over `etp`; `load` is what the busiest of
    these ranks is sent, over the mean. `context` says how sequences are shared out; None: each lies on one rank.
    Experts' rows lie in whole blocks of `block_rows`; 0: as they come.
    """

    model: Model
    seq_len: int
    stack: Stack
    on_cpu: bool
    tp: Number
    mbs: Number
    sequence_parallel: Bools | bool
    element: Number
    moved_element: Number
    casts: Casts = UNCAST
    ep: Number = 1.0
    etp: Number = 1.0
    load: Number = 1.0
    permuting: Permuting = Permuting()
    context: Context | None = None
    block_rows: Number = 0.0

    @property
    def tokens(self) -> Number:
        """Tokens of the micro-batch on this rank, b s, or b s / CP where its sequences are shared out."""
        whole = self.mbs * float(self.seq_len)
        return whole if self.context is None else whole / self.context.ranks

    @cached_property
    def message(self) -> Number:
        """Bytes of the micro-batch's hidden state, which TP's ranks sum and stages send."""
        return self.tokens * self.model.hidden * self.element

    @cached_property
    def layer_message(self) -> Number:
        """Bytes that stand for the hidden state in a layer's sums over TP.

        Sequence parallelism gathers what a product reads, as it is cast, and reduces what it leaves, in 16 bit.
        """
        if self.casts is UNCAST:
            return self.message
        return self.message * np.where(self.sequence_parallel, 0.5 + 0.5 * self.casts.gathered_share, 1.0)

    @property
    def repeated(self) -> Number:
        """By how much what TP ranks all hold of the hidden state is split: TP under sequence parallelism, else 1."""
        return np.where(self.sequence_parallel, self.tp, 1.0)

    @property
    def latent(self) -> LatentAttention:
        """The model's latent attention, of which there is one."""
        assert self.model.latent_attention is not None
        return self.model.latent_attention

    @property
    def own_tokens(self) -> Number:
        """Tokens that this rank routes to experts: its slice under sequence parallelism."""
        return self.tokens / self.repeated

    @property
    def local_experts(self) -> Number:
        """Experts that this rank holds."""
        return self.model.experts / np.asarray(self.ep)

    @property
    def received(self) -> Number:
        """Tokens that the busiest rank's experts are given: copies of its own group's, and those of the ranks that cut
        the same experts, unless these hold the same tokens already.
        """
        slices = np.where(self.sequence_parallel, self.etp, np.maximum(np.asarray(self.etp) / self.tp, 1.0))
        return self.own_tokens * self.model.top_k * self.load * slices

    @property
    def in_blocks(self) -> Number:
        """Rows that the busiest rank's experts compute with: each expert's last block is half full on average."""
        return self.received + 0.5 * self.block_rows * self.local_experts

    @property
    def hidden_elements(self) -> Number:
        """Elements of the hidden state on this rank."""
        return self.tokens * self.model.hidden / self.repeated

    @property
    def key_features(self) -> Number:
        """Features of the keys on this rank: of whole heads, which ranks beyond their number repeat."""
        return np.ceil(self.model.kv_heads / np.asarray(self.tp)) * self.model.head_dim

    @property
    def attended(self) -> float:
        """Keys that a query meets, the masked half counted in: s, or less where layers have a window; mean over layers.

        A window of w keeps w s - w^2 / 2 of the s^2 / 2 pairs that causal attention has, so it stands for
        w (2 - w / s) keys.
        """
        window, s = self.model.sliding_window, float(self.seq_len)
        share = self.windowed_share
        return (1.0 - share) * s + (share * window * (2.0 - window / s) if share else 0.0)

    @property
    def windowed_share(self) -> float:
        """Share of the layers whose window is shorter than a sequence."""
        model, every = self.model, self.model.full_attention_every
        if not 0 < model.sliding_window < self.seq_len:
            return 0.0
        return 1.0 - (model.layers // every) / model.layers if every else 1.0

    @property
    def fused_softmax(self) -> Bools:
        """Whether Megatron's fused kernel takes the scores: 16 bit, (a/t) b in fours, s within its limit.

        Megatron-LM, megatron/model/fused_softmax.py, is_kernel_available.
        """
        stack, s = self.stack, self.seq_len
        fits = stack.fused_softmax and 16 < s <= stack.fused_softmax_max_seq and s % 4 == 0
        eligible = ((self.model.heads / self.tp * self.mbs) % 4 == 0) & (np.asarray(self.moved_element) < 4)
        return np.asarray(eligible & fits)

    @classmethod
    def whole(cls, model: Model, seq_len: int, stack: Stack | None = None) -> Part:
        """A whole sequence in 16 bit on one rank."""
        width = PRECISIONS["bf16"].activation_bytes
        return cls(model, seq_len, stack or Stack(), False, 1.0, 1.0, False, width, width)
