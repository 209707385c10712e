"""What a model keeps for its backward, and what a whole step holds: under FakeTensorMode, at full size, without memory.

Fake tensors carry shapes alone, so real model code runs at any size in seconds. They stand on the CPU here: a fake CUDA
tensor cannot be a leaf of autograd where PyTorch was built without CUDA (its device guard is missing). Two operators
choose a kernel by device, and `as_on_cuda` of trimaran.train.programs.tracing makes the choice that CUDA makes:
`scaled_dot_product_attention` runs flash attention, and `rms_norm` the fused kernel where the traced version of PyTorch
has it (2.9 and later).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Kept:
    """A storage that is kept for the backward: where it was last kept, its shape as seen there, and its bytes."""

    module: str
    shape: tuple[int, ...]
    dtype: str
    size: int


def _local(tensor: Tensor) -> Tensor:
    """The rank's own part of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return _local(tensor).untyped_storage()


class Saved:
    """Collects what autograd saves while it is entered, by storage; parameters and `known` tensors are left out."""

    def __init__(self, model: nn.Module, known: Sequence[Tensor] = ()) -> None:
        self._kept: dict[int, Kept] = {}
        self._known = {_storage(t)._cdata for t in (*model.parameters(), *model.buffers(), *known)}
        self._storages: list[torch.UntypedStorage] = []  # held, so that no other takes the place of one
        self._inside: list[str] = []
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._entering(name)))
            self._hooks.append(module.register_forward_hook(self._leaving, always_call=True))
        self._packing = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self._inside.append(name)

    def _leaving(self, *_: object) -> None:
        self._inside.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage._cdata not in self._known:
            self._storages.append(storage)
            where = self._inside[-1] if self._inside else ""
            self._kept[storage._cdata] = Kept(where, tuple(tensor.shape), str(tensor.dtype)[6:], storage.nbytes())
        return tensor

    def __enter__(self) -> Saved:
        self._packing.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._packing.__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    @property
    def kept(self) -> list[Kept]:
        """Every storage once, with the module that kept it last: a product's input counts with the product."""
        return list(self._kept.values())

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(kept.size for kept in self.kept)


class Live(TorchDispatchMode):
    """Bytes of all storages alive that were made while it is entered, and their peak.

    FSDP2 frees what it gathered by resizing storages to nothing, which counts as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.stage, self.peak_stage = "", ""
        self.at_peak: dict[str, int] = {}
        self.events: list[tuple[int, int]] = []  # (storage, bytes), negative where freed
        self._alive: dict[int, tuple[int, str]] = {}
        self._resize = torch.UntypedStorage.resize_

    def watch(self, tensor: Tensor, what: str) -> None:
        """Count a tensor that is there already."""
        storage = _storage(tensor)
        if storage._cdata not in self._alive:
            self._alive[storage._cdata] = 0, what
            weakref.finalize(storage, self._freed, storage._cdata)
            self._count(storage._cdata, storage.nbytes())

    def _count(self, key: int, size: int) -> None:
        before, what = self._alive[key]
        self.events += [(key, change) for change in (-before, size) if change]
        self._alive[key] = size, what
        self.now += size - before
        if self.now > self.peak:
            shares: dict[str, int] = defaultdict(int)
            for held, name in self._alive.values():
                shares[name] += held
            self.peak, self.peak_stage, self.at_peak = self.now, self.stage, dict(shares)

    def _freed(self, key: int) -> None:
        if key in self._alive:
            self._count(key, 0)
            del self._alive[key]

    def __enter__(self) -> Live:
        live, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            found = resize(storage, size)
            if storage._cdata in live._alive:
                live._count(storage._cdata, size)
            return found

        torch.UntypedStorage.resize_ = resized
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.watch(leaf, func.overloadpacket.__name__)
        return found


@contextlib.contextmanager
def fake_mode(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Every tensor is a shape, of `dtype` where nothing else is said."""
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.set_default_dtype(usual)
