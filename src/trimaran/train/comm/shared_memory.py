"""Collectives through shared memory, for CPU ranks of one machine.

Gloo moves every byte through loopback sockets. Here each rank copies its tensor where the others can read it, and
adds up theirs: an all-reduce of 384 KiB between two ranks takes a sixth of the time (docs/training-speed.md). Ranks
wait on POSIX semaphores, so that those who share a core do not burn each other's time.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

SHM_DIR = Path("/dev/shm")

# One slot fits in a core's second-level cache beside the tensor it is added to.
SLOT_BYTES = 1 << 20

# Three or more ranks each read all of the others' slots up to this size, and share the adding above it.
DIRECT_BYTES = 1 << 15

# sem_t is 32 bytes with glibc and 16 with musl; a cache line of its own keeps waiters apart.
SEMAPHORE_BYTES = 64

# How long a rank waits before it looks whether those it waits for still live.
PATIENCE_S = 1.0


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class PeerDiedError(RuntimeError):
    """A rank that others wait for has ended."""


class SharedMemory:
    """A file in memory with two slots a rank and a semaphore for each ordered pair of ranks.

    Slots take turns: an operation writes the slots of its turn, and nobody can come round to
    the same turn before all have read them, since the operation between waits for everybody.
    """

    def __init__(self, path: Path, index: int, size: int, pids: Sequence[int]) -> None:
        self._index, self._size, self._pids = index, size, pids
        self._turn = 0
        semaphores = size * size * SEMAPHORE_BYTES
        self._slots_at = -(-semaphores // mmap.PAGESIZE) * mmap.PAGESIZE
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), bytes_needed(size))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        self._libc = ctypes.CDLL(None, use_errno=True)

    def make_semaphores(self) -> None:
        """Set all semaphores to zero; one rank does so before the others come in."""
        for at in range(0, self._size * self._size * SEMAPHORE_BYTES, SEMAPHORE_BYTES):
            if self._libc.sem_init(ctypes.c_void_p(self._address + at), 1, 0):
                raise OSError(ctypes.get_errno(), "sem_init failed")

    def _semaphore(self, source: int, target: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._address + (source * self._size + target) * SEMAPHORE_BYTES)

    def _slot(self, rank: int, like: Tensor) -> Tensor:
        begin = self._slots_at + (2 * rank + self._turn) * SLOT_BYTES
        return self._bytes[begin : begin + like.numel() * like.element_size()].view(like.dtype)

    def _others(self) -> list[int]:
        """The other ranks, from the next one on."""
        return [(self._index + step) % self._size for step in range(1, self._size)]

    def _meet(self) -> None:
        """Return once every rank has come here."""
        for other in self._others():
            self._libc.sem_post(self._semaphore(self._index, other))
        for other in self._others():
            self._wait(self._semaphore(other, self._index), other)

    def _wait(self, semaphore: ctypes.c_void_p, other: int) -> None:
        while self._libc.sem_trywait(semaphore):
            until = time.time() + PATIENCE_S
            deadline = _Timespec(int(until), int(until % 1 * 1e9))
            if self._libc.sem_timedwait(semaphore, ctypes.byref(deadline)) == 0:
                return
            try:
                os.kill(self._pids[other], 0)
            except ProcessLookupError:
                raise PeerDiedError(f"process {self._pids[other]} of the same group has ended") from None

    def sum_(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks, in place; the bits are the same on every rank."""
        flat = tensor.view(-1)
        step = SLOT_BYTES // tensor.element_size()
        for begin in range(0, flat.numel(), step):
            own = flat[begin : begin + step]
            self._slot(self._index, own).copy_(own)
            self._meet()
            if self._size == 2:
                own.add_(self._slot(1 - self._index, own))
            elif own.numel() * own.element_size() <= DIRECT_BYTES:
                self._add_slots(own, 0, own.numel(), out=own)
            else:
                self._add_in_parts(own)
            self._turn = 1 - self._turn

    def _add_in_parts(self, own: Tensor) -> None:
        """Each rank adds up one part of the slots, leaves it in its own slot, and takes the others' parts."""
        bounds = [own.numel() * rank // self._size for rank in range(self._size + 1)]
        begin, end = bounds[self._index : self._index + 2]
        self._add_slots(own, begin, end, out=own[begin:end])
        self._slot(self._index, own)[begin:end].copy_(own[begin:end])
        self._meet()
        for rank in range(self._size):
            if rank != self._index:
                begin, end = bounds[rank : rank + 2]
                own[begin:end].copy_(self._slot(rank, own)[begin:end])

    def _add_slots(self, like: Tensor, begin: int, end: int, out: Tensor) -> None:
        """Out = the sum of all slots, from `begin` to `end`; in the order of the ranks, on which rounding depends."""
        _add_up([self._slot(rank, like)[begin:end] for rank in range(self._size)], out)

    def sum_to_first_(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks, in place on rank 0; the others' stays as it is."""
        flat = tensor.view(-1)
        step = SLOT_BYTES // tensor.element_size()
        for begin in range(0, flat.numel(), step):
            own = flat[begin : begin + step]
            if self._index:
                self._slot(self._index, own).copy_(own)
            self._meet()
            if not self._index:
                _add_up([own, *(self._slot(rank, own) for rank in self._others())], own)
            self._turn = 1 - self._turn

    def broadcast_first_(self, tensor: Tensor) -> None:
        """Give every rank the `tensor` of rank 0."""
        flat = tensor.view(-1)
        step = SLOT_BYTES // tensor.element_size()
        for begin in range(0, flat.numel(), step):
            own = flat[begin : begin + step]
            if not self._index:
                self._slot(0, own).copy_(own)
            self._meet()
            if self._index:
                own.copy_(self._slot(0, own))
            self._turn = 1 - self._turn

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's `tensor`, which fits into one slot."""
        self._slot(self._index, tensor).copy_(tensor.reshape(-1))
        self._meet()
        gathered = [self._slot(rank, tensor).clone().view(tensor.shape) for rank in range(self._size)]
        self._turn = 1 - self._turn
        return gathered

    def scatter_sum(self, own: Tensor, whole: Tensor) -> None:
        """Own = this rank's part of `whole`, which has `size` parts of own's length, summed over the ranks.

        `own` may be that part of `whole` itself; the other parts of `whole` are left alone.
        """
        flat, parts = own.view(-1), whole.view(self._size, -1)
        others = [rank for rank in range(self._size) if rank != self._index]
        step = SLOT_BYTES // whole.element_size() // self._size
        for begin in range(0, flat.numel(), step):
            span = slice(begin, min(begin + step, flat.numel()))
            pieces = parts[:, span]
            mine = self._slot(self._index, pieces).view(pieces.shape)
            for rank in others:
                mine[rank].copy_(pieces[rank])
            self._meet()
            theirs = [self._slot(rank, pieces).view(pieces.shape)[self._index] for rank in others]
            _add_up([pieces[self._index], *theirs], flat[span])
            self._turn = 1 - self._turn

    def gather_into(self, whole: Tensor, own: Tensor) -> None:
        """Whole = every rank's `own`, one after the other; `own` may be this rank's part of `whole` itself."""
        flat, parts = own.view(-1), whole.view(self._size, -1)
        step = SLOT_BYTES // whole.element_size()
        for begin in range(0, flat.numel(), step):
            span = slice(begin, min(begin + step, flat.numel()))
            self._slot(self._index, flat[span]).copy_(flat[span])
            self._meet()
            for rank in range(self._size):
                source = flat[span] if rank == self._index else self._slot(rank, flat[span])
                parts[rank, span].copy_(source)
            self._turn = 1 - self._turn


def _add_up(parts: Sequence[Tensor], out: Tensor) -> None:
    """Out = the sum of two or more parts, in their order. Those of 16 bit are added up in fp32 and rounded once."""
    first, second, *rest = parts
    if not rest or out.element_size() > 2:
        torch.add(first, second, out=out)
        for part in rest:
            out.add_(part)
        return
    total = first.float()
    for part in (second, *rest):
        total.add_(part)
    out.copy_(total)


def bytes_needed(size: int) -> int:
    """Bytes of the file for `size` ranks."""
    semaphores = -(-size * size * SEMAPHORE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
    return semaphores + 2 * size * SLOT_BYTES


def _machine() -> int:
    """A number that two processes share when they are of one node: its memory's file system, boot and network.

    Ranks in network namespaces of their own stand for nodes of their own, whose memory they must not share.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    where, network = SHM_DIR.stat(), Path("/proc/self/ns/net").stat()
    node = f"{boot}{where.st_dev}/{where.st_ino} {network.st_dev}/{network.st_ino}"
    return int.from_bytes(hashlib.sha256(node.encode()).digest()[:7], "little")


def _gather_numbers(numbers: list[int], size: int, group: dist.ProcessGroup | None) -> list[list[int]]:
    gathered = [torch.zeros(len(numbers), dtype=torch.int64) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor(numbers, dtype=torch.int64), group=group)
    return [tensor.tolist() for tensor in gathered]


def share_memory(index: int, size: int, group: dist.ProcessGroup | None) -> SharedMemory | None:
    """Shared memory of a group, or None on all its ranks where they are not on one Linux machine with room for it.

    Every rank of the group has to call this.
    """
    token, machine = secrets.randbits(60), 0
    path = SHM_DIR / f"trimaran-{token:015x}"
    memory: SharedMemory | None = None
    try:
        machine = _machine()
        if index == 0:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, bytes_needed(size))
            finally:
                os.close(descriptor)
            memory = SharedMemory(path, index, size, [])
            memory.make_semaphores()
    except OSError:
        machine = 0
    try:
        told = _gather_numbers([machine, token, os.getpid()], size, group)
        usable = machine != 0 and len({machine for machine, _, _ in told}) == 1
        if usable:
            try:
                memory = SharedMemory(SHM_DIR / f"trimaran-{told[0][1]:015x}", index, size, [pid for _, _, pid in told])
            except (OSError, ValueError):
                usable = False
        agreed = all(answer for (answer,) in _gather_numbers([int(usable)], size, group))
    finally:
        if index == 0:
            # those who mapped it keep it; nothing is left behind, however they end
            path.unlink(missing_ok=True)
    return memory if agreed else None
