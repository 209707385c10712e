"""What a program holds, computes and sends, without doing any of it: its tensors are shapes on the meta device."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Where the factors of a matrix product stand among the arguments of an operator that makes one.
_FACTORS = {
    "mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2), "baddbmm_": (1, 2),
    "_scaled_mm": (0, 1),
}  # fmt: skip
# Matrix products of a flash kernel, forward and backward, each as wide as queries and keys, and as wide as values.
_FLASH = {
    "_scaled_dot_product_flash_attention": (1, 1), "_scaled_dot_product_flash_attention_backward": (3, 2),
    "_scaled_dot_product_efficient_attention": (1, 1), "_scaled_dot_product_efficient_attention_backward": (3, 2),
}  # fmt: skip


@dataclass
class Sent:
    """Collectives of one kind over one group: how many, and the bytes of the whole tensors that they are about."""

    count: int = 0
    size: int = 0


@dataclass(frozen=True)
class Counted:
    """What a trace has counted: operations of products, and collectives by group and kind."""

    operations: float
    sent: dict[tuple[str, str], Sent]


@dataclass
class Held:
    """Bytes that are alive, by what they are for."""

    now: int = 0
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)


class Trace(TorchDispatchMode):
    """Follows every operator while it is entered: storages alive and their peak, operations of products, collectives.

    Storages that were there before count once they are `watched`, under a name of their own, and so does what is
    resized. `group_names` names process groups, `exchanging` those whose ranks exchange rows by all-to-all. Of causal
    attention in a flash kernel scores are counted in full.
    """

    def __init__(self, group_names: dict[str, str], exchanging: dict[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = Held()
        self.operations = 0.0
        self.sent: dict[tuple[str, str], Sent] = defaultdict(Sent)
        self._group_names, self._exchanging = group_names, exchanging
        self._alive: dict[int, tuple[int, str]] = {}
        self._shares: dict[str, int] = defaultdict(int)
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def so_far(self) -> Counted:
        """What was counted until now."""
        return Counted(self.operations, {key: replace(sent) for key, sent in self.sent.items()})

    def repeat_since(self, before: Counted, times: int) -> None:
        """Count what came since then so many times more: memory is the same each time."""
        self.operations += times * (self.operations - before.operations)
        for key, sent in self.sent.items():
            then = before.sent.get(key, Sent())
            sent.count += times * (sent.count - then.count)
            sent.size += times * (sent.size - then.size)

    def watch(self, tensor: Tensor, what: str) -> None:
        """Count a tensor's storage from now on, as `what`."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = 0, what
            weakref.finalize(storage, self._freed, key)
            self._count(key, storage.nbytes())

    def _count(self, key: int, size: int) -> None:
        before, what = self._alive[key]
        self._alive[key] = size, what
        self._shares[what] += size - before
        held = self.held
        held.now += size - before
        if held.now > held.peak:
            held.peak, held.at_peak = held.now, dict(self._shares)

    def _freed(self, key: int) -> None:
        self._count(key, 0)
        del self._alive[key]

    def __enter__(self) -> Trace:
        trace, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if storage._cdata in trace._alive:
                trace._count(storage._cdata, size)
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self._count_collective(name, args)
        elif name in _FACTORS:
            left, right = (args[place] for place in _FACTORS[name])
            self.operations += 2.0 * left.numel() * right.shape[-1]
        elif name in _FLASH:
            q, k, v = (args[place] for place in ((1, 2, 3) if name.endswith("backward") else (0, 1, 2)))
            of_scores, of_context = _FLASH[name]
            rows = q.numel() // q.shape[-1]
            self.operations += 2.0 * rows * k.shape[2] * (of_scores * q.shape[-1] + of_context * v.shape[-1])
        if isinstance(found, Tensor):
            self.watch(found, "activations")
        else:
            for leaf in tree_leaves(found):
                if isinstance(leaf, Tensor):
                    self.watch(leaf, "activations")
        return found

    def _count_collective(self, name: str, args: Any) -> None:
        if name in ("recv_", "barrier"):  # the sender counts
            return
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        kind = _KINDS.get(name, name)
        names = self._exchanging if kind == "all_to_all" else self._group_names
        sent = self.sent[names.get(dist.ProcessGroup.unbox(boxed).group_name, "world"), kind]
        sent.count += 1
        sent.size += max(tensor.numel() * tensor.element_size() for tensor in tensors)


_KINDS = {
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_": "reduce", "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all", "alltoall_": "all_to_all",
}  # fmt: skip


def _flash(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
           scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """Fused attention as CUDA's kernels give it: (b, heads, s, d) whose memory is (b, s, heads, d).

    Values that are not as wide as keys go to the other one of them.
    """
    del attn_mask, enable_gqa
    kernels = torch.ops.aten
    if q.shape[-1] == v.shape[-1]:
        found: Tensor = kernels._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    else:
        efficient = kernels._scaled_dot_product_efficient_attention
        found = efficient(q, k, v, None, True, dropout_p, is_causal, scale=scale)[0]
    return found


class _FusedRmsNorm(torch.autograd.Function):
    """Keeps what CUDA's kernel keeps: the input, the weight, and one number a row (derivatives.yaml, _fused_rms_norm).

    On other devices that operator is made of others even when it is called by its name.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x[..., :1].float())
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _fused_rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    del shape, eps
    normed: Tensor = _FusedRmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return normed


@contextlib.contextmanager
def as_on_cuda(*, fused_rms_norm: bool = True) -> Iterator[None]:
    """Choose kernels by device as on CUDA; `fused_rms_norm`: as in PyTorch 2.9 and later."""
    attention, norm = functional.scaled_dot_product_attention, functional.rms_norm
    try:
        functional.scaled_dot_product_attention = _flash  # type: ignore[assignment]
        if fused_rms_norm:
            functional.rms_norm = _fused_rms_norm  # type: ignore[assignment]
        yield
    finally:
        functional.scaled_dot_product_attention = attention
        functional.rms_norm = norm
