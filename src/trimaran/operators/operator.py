"""Operator: the products, passes over memory, kept tensors and collectives of one kernel or a few that run as one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.precision import PRECISIONS
from trimaran.nouns.stack import Stack
from trimaran.operators.casts import UNCAST, Casts, Number

Bools = NDArray[np.bool_]
# linear: by weights; batched: one product a head; flash: scores are never written, and the masked half is skipped.
Kernel = Literal["linear", "batched", "flash"]
CollectiveKind = Literal["all_reduce"]
Phase = Literal["forward", "backward"]
# A soft cap of what lies in memory divides, takes tanh and multiplies, in PyTorch's eager operators: passes over it
# forward and backward, and copies kept (of tanh's result).
SOFTCAP_PASSES = (6.0, 7.0, 1.0)


@dataclass(frozen=True)
class Product:
    """`batch` matrix products of m x k times k x n."""

    m: Number
    n: Number
    k: Number
    batch: Number = 1.0

    @property
    def operations(self) -> Number:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k * self.batch


@dataclass(frozen=True)
class Tensor:
    """A tensor that is kept from the forward for the backward, and its bytes on one rank."""

    name: str
    size: Number


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
    its products leave, which a recompute by operator may keep. `launches` counts the operators that the host launches
    forward, `drawn` the random numbers. Products of a `narrow` one are in the precision's narrow format, if it has one.
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
class Part:
    """One rank's part of one micro-batch, over n distinct shapes: arrays of shape (n,), or plain numbers.

    `element` is the bytes of an element that is kept, `moved_element` of one that passes through memory: a CPU makes
    fp16 products in fp32.
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

    def __post_init__(self) -> None:
        """Raise TrimaranError for a model that the operators here are not those of."""
        if self.model.not_computed:
            raise TrimaranError(self.model.not_computed)

    @property
    def tokens(self) -> Number:
        """Tokens of the micro-batch, b s."""
        return self.mbs * float(self.seq_len)

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
        return self.message * np.where(self.sequence_parallel, 0.5 + 0.5 * self.casts.share, 1.0)

    @property
    def repeated(self) -> Number:
        """By how much what TP ranks all hold of the hidden state is split: TP under sequence parallelism, else 1."""
        return np.where(self.sequence_parallel, self.tp, 1.0)

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
        model, s = self.model, float(self.seq_len)
        if not 0 < model.sliding_window < s:
            return s
        windowed = model.sliding_window * (2.0 - model.sliding_window / s)
        every = model.full_attention_every
        whole = (model.layers // every) / model.layers if every else 0.0
        return whole * s + (1.0 - whole) * windowed

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
