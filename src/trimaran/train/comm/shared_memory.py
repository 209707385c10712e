"""Collectives through shared memory, for CPU ranks of one machine.

Gloo moves every byte through loopback sockets. Here each rank copies its tensor to where the others can read it, and
adds up what they have copied: an all-reduce of 384 KiB between two ranks takes a sixth of the time
(docs/training-speed.md). Ranks wait on POSIX semaphores, so that waiting takes no time of a core that ranks share.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.train.comm.waiting import WaitClock

SHM_DIR = Path("/dev/shm")

# One slot fits in a core's second-level cache beside the tensor it is added to.
SLOT_BYTES = 1 << 20

# Three or more ranks each read all of the others' slots up to this size, and share the adding above it.
DIRECT_BYTES = 1 << 15

# sem_t is 32 bytes with glibc and 16 with musl; a cache line each keeps waiters apart.
SEMAPHORE_BYTES = 64

# How long a rank waits before it checks that the process it waits for still runs.
PATIENCE_S = 1.0


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class PeerDiedError(RuntimeError):
    """A rank that others wait for has ended."""


class SharedMemory:
    """A file in memory with two slots a rank and a semaphore for each ordered pair of ranks.

    Operations use the two slots in turns. No rank can write to a slot that others still read, since the operation
    in between waits for every rank.
    """

    def __init__(self, path: Path, index: int, size: int, pids: Sequence[int], clock: WaitClock) -> None:
        self._index, self._size, self._pids, self._clock = index, size, pids, clock
        self._turn = 0
        semaphores = size * size * SEMAPHORE_BYTES
        self._slots_at = -(-semaphores // mmap.PAGESIZE) * mmap.PAGESIZE
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), bytes_needed(size))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        self._libc = ctypes.CDLL(None, use_errno=True)

    def make_semaphores(self) -> None:
        """Set all semaphores to zero; one rank does so before the others map the file."""
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

    def _barrier(self) -> None:
        """Return once every rank has come here."""
        for other in self._others():
            self._libc.sem_post(self._semaphore(self._index, other))
        with self._clock.waiting():
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

    def _chunks(self, tensor: Tensor) -> Iterator[Tensor]:
        """Parts of the tensor that fit into a slot each; the slots take turns from part to part."""
        flat, step = tensor.view(-1), SLOT_BYTES // tensor.element_size()
        for begin in range(0, flat.numel(), step):
            yield flat[begin : begin + step]
            self._turn = 1 - self._turn

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks, in place; the bits are the same on every rank."""
        for chunk in self._chunks(tensor):
            self._slot(self._index, chunk).copy_(chunk)
            self._barrier()
            if self._size == 2:
                chunk.add_(self._slot(1 - self._index, chunk))
            elif chunk.numel() * chunk.element_size() <= DIRECT_BYTES:
                self._add_slots(chunk, 0, chunk.numel(), out=chunk)
            else:
                self._add_in_parts(chunk)

    def _add_in_parts(self, chunk: Tensor) -> None:
        """Each rank adds up one part of the slots, leaves the sum in its slot, and copies the others' parts."""
        bounds = [chunk.numel() * rank // self._size for rank in range(self._size + 1)]
        begin, end = bounds[self._index : self._index + 2]
        self._add_slots(chunk, begin, end, out=chunk[begin:end])
        self._slot(self._index, chunk)[begin:end].copy_(chunk[begin:end])
        self._barrier()
        for rank in range(self._size):
            if rank != self._index:
                begin, end = bounds[rank : rank + 2]
                chunk[begin:end].copy_(self._slot(rank, chunk)[begin:end])

    def _add_slots(self, like: Tensor, begin: int, end: int, out: Tensor) -> None:
        """Sum all slots from `begin` to `end` into `out`, in the order of the ranks, on which rounding depends."""
        _add_up([self._slot(rank, like)[begin:end] for rank in range(self._size)], out)

    def reduce_to_first(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks, in place on rank 0; on the others it stays as it is."""
        for chunk in self._chunks(tensor):
            if self._index:
                self._slot(self._index, chunk).copy_(chunk)
            self._barrier()
            if not self._index:
                _add_up([chunk, *(self._slot(rank, chunk) for rank in self._others())], chunk)

    def broadcast_from_first(self, tensor: Tensor) -> None:
        """Give every rank the `tensor` of rank 0."""
        for chunk in self._chunks(tensor):
            if not self._index:
                self._slot(0, chunk).copy_(chunk)
            self._barrier()
            if self._index:
                chunk.copy_(self._slot(0, chunk))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's `tensor`, which fits into one slot."""
        self._slot(self._index, tensor).copy_(tensor.reshape(-1))
        self._barrier()
        gathered = [self._slot(rank, tensor).clone().view(tensor.shape) for rank in range(self._size)]
        self._turn = 1 - self._turn
        return gathered

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> None:
        """Fill `shard` with this rank's of the `size` shards of `whole`, summed over the ranks.

        `shard` may be that part of `whole` itself; the other parts of `whole` are left alone.
        """
        flat, shards = shard.view(-1), whole.view(self._size, -1)
        others = [rank for rank in range(self._size) if rank != self._index]
        step = SLOT_BYTES // whole.element_size() // self._size
        for begin in range(0, flat.numel(), step):
            span = slice(begin, min(begin + step, flat.numel()))
            chunks = shards[:, span]
            slot = self._slot(self._index, chunks).view(chunks.shape)
            for rank in others:
                slot[rank].copy_(chunks[rank])
            self._barrier()
            sent_here = [self._slot(rank, chunks).view(chunks.shape)[self._index] for rank in others]
            _add_up([chunks[self._index], *sent_here], flat[span])
            self._turn = 1 - self._turn

    def all_gather_into(self, whole: Tensor, shard: Tensor) -> None:
        """Fill `whole` with every rank's `shard`, one after the other; `shard` may be a part of `whole` itself."""
        flat, shards = shard.view(-1), whole.view(self._size, -1)
        step = SLOT_BYTES // whole.element_size()
        for begin in range(0, flat.numel(), step):
            span = slice(begin, min(begin + step, flat.numel()))
            self._slot(self._index, flat[span]).copy_(flat[span])
            self._barrier()
            for rank in range(self._size):
                source = flat[span] if rank == self._index else self._slot(rank, flat[span])
                shards[rank, span].copy_(source)
            self._turn = 1 - self._turn

    def shift(self, tensor: Tensor, arrived: Tensor) -> None:
        """Fill `arrived` with the `tensor` of the rank before this one, the last coming before the first."""
        source, flat, at = (self._index - 1) % self._size, arrived.view(-1), 0
        for chunk in self._chunks(tensor):
            self._slot(self._index, chunk).copy_(chunk)
            self._barrier()
            flat[at : at + len(chunk)].copy_(self._slot(source, chunk))
            at += len(chunk)

    def all_to_all(self, arrived: Tensor, tensor: Tensor) -> None:
        """Give every rank its part of `tensor`, and fill `arrived` with the parts for this rank, in order of rank."""
        parts, targets = tensor.view(self._size, -1), arrived.view(self._size, -1)
        step = SLOT_BYTES // tensor.element_size() // self._size
        for begin in range(0, parts.shape[1], step):
            chunks = parts[:, begin : begin + step]
            self._slot(self._index, chunks).view(chunks.shape).copy_(chunks)
            self._barrier()
            for rank in range(self._size):
                sent_here = self._slot(rank, chunks).view(chunks.shape)[self._index]
                targets[rank, begin : begin + step].copy_(sent_here)
            self._turn = 1 - self._turn

    def exchange(self, received: Tensor, sent: Tensor, counts: Sequence[Sequence[int]]) -> None:
        """Fill `received` with what each rank sends here, in their order; `counts[i][j]` elements go from i to j.

        What a rank sends lies in `sent` in the order of the ranks. It passes through the rank's slot as one stream,
        of which every rank takes its part; what stays here goes past it.
        """
        me, ranks = self._index, range(self._size)
        flat_sent, flat_received = sent.view(-1), received.view(-1)
        # where each part begins in a rank's stream, in what this rank sends and in what it receives
        streams = [_begins([0 if j == i else counts[i][j] for j in ranks]) for i in ranks]
        out, into = _begins(counts[me]), _begins([counts[i][me] for i in ranks])
        flat_received[into[me] : into[me + 1]] = flat_sent[out[me] : out[me + 1]]
        step = SLOT_BYTES // sent.element_size()
        window = torch.empty(step, dtype=sent.dtype, device="meta")
        for begin in range(0, max(stream[-1] for stream in streams), step):
            for other in self._others():
                at, low, high = _within(streams[me][other], counts[me][other], begin, begin + step)
                self._slot(me, window)[at : at + high - low] = flat_sent[out[other] + low : out[other] + high]
            self._barrier()
            for other in self._others():
                at, low, high = _within(streams[other][me], counts[other][me], begin, begin + step)
                flat_received[into[other] + low : into[other] + high] = self._slot(other, window)[at : at + high - low]
            self._turn = 1 - self._turn


def _begins(lengths: Sequence[int]) -> list[int]:
    """Where each part begins in parts laid one after the other, and where the last one ends."""
    return [0, *accumulate(lengths)]


def _within(first: int, length: int, begin: int, end: int) -> tuple[int, int, int]:
    """Of a part at `first` in a stream: where it lies in the window from `begin` to `end`, and which of it does."""
    low = min(max(begin - first, 0), length)
    high = max(min(end - first, length), low)
    return max(first + low - begin, 0), low, high


def _add_up(parts: Sequence[Tensor], out: Tensor) -> None:
    """Sum two or more parts into `out`, in their order. Those of 16 bit are added up in fp32 and rounded once."""
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
    """A number that is the same for processes of one node: of its memory's file system, boot, network and processes.

    Ranks in different network namespaces stand for ranks of different nodes, which must not share memory. Those in
    different namespaces of processes, as containers that share the rest, cannot ask whether the others still live.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    spaces = (path.stat() for path in (SHM_DIR, Path("/proc/self/ns/net"), Path("/proc/self/ns/pid")))
    node = f"{boot}{' '.join(f'{space.st_dev}/{space.st_ino}' for space in spaces)}"
    return int.from_bytes(hashlib.sha256(node.encode()).digest()[:7], "little")


def _gather_numbers(numbers: list[int], size: int, group: dist.ProcessGroup | None) -> list[list[int]]:
    gathered = [torch.zeros(len(numbers), dtype=torch.int64) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor(numbers, dtype=torch.int64), group=group)
    return [tensor.tolist() for tensor in gathered]


def share_memory(index: int, size: int, group: dist.ProcessGroup | None, clock: WaitClock) -> SharedMemory | None:
    """Shared memory of a group, or None on all its ranks where they are not on one Linux machine with room for it.

    Every rank of the group has to call this. `clock` counts how long ranks then wait for each other.
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
            memory = SharedMemory(path, index, size, [], clock)
            memory.make_semaphores()
    except OSError:
        machine = 0
    try:
        peers = _gather_numbers([machine, token, os.getpid()], size, group)
        usable = machine != 0 and len({machine for machine, _, _ in peers}) == 1
        if usable:
            try:
                pids = [pid for _, _, pid in peers]
                memory = SharedMemory(SHM_DIR / f"trimaran-{peers[0][1]:015x}", index, size, pids, clock)
            except (OSError, ValueError):
                usable = False
        agreed = all(answer for (answer,) in _gather_numbers([int(usable)], size, group))
    finally:
        if index == 0:
            # ranks that mapped the file keep its memory; no file is left behind, however they end
            path.unlink(missing_ok=True)
    return memory if agreed else None
