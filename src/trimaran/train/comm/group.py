"""Group: ranks that act together, and the collectives among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.train.comm.exchange import Finish, begin_all_gather, begin_reduce_scatter, begin_shift, done, finish_all
from trimaran.train.comm.shared_memory import SharedMemory, share_memory
from trimaran.train.comm.waiting import RENDEZVOUS_TIMEOUT, WaitClock


@dataclass(frozen=True)
class Group:
    """Ranks that act together, in order; `index` is this rank's place among them.

    `slices_sequence` says of a TP group that each of its ranks keeps a slice of the sequence wherever all would
    otherwise do the same: sequence parallelism. `clock` counts how long this rank waits for others.
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    memory: SharedMemory | None = None
    slices_sequence: bool = False
    clock: WaitClock = field(default_factory=WaitClock, compare=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the group, in place."""
        if self.memory is not None:
            self.memory.all_reduce(tensor)
        elif self.size > 1:
            with self.clock.waiting():
                dist.all_reduce(tensor, group=self.handle)

    @property
    def overlaps(self) -> bool:
        """Whether a collective that was begun goes on beside computing. Through shared memory it is done at once."""
        return self.size > 1 and self.memory is None

    def begin_all_reduce(self, tensor: Tensor) -> Finish:
        """Begin to sum `tensor` over the group, in place."""
        if self.overlaps:
            return self._timed(finish_all([dist.all_reduce(tensor, group=self.handle, async_op=True)]))
        self.all_reduce(tensor)
        return done

    def meet(self, device: torch.device) -> None:
        """Return once every rank has come here."""
        met = torch.zeros(1, device=device)
        self.all_reduce(met)
        met.item()  # of a GPU the host waits for the sum here alone

    def reduce_to_first(self, tensor: Tensor) -> None:
        """Sum `tensor` over the group, in place on its first rank; what the others hold is of no use then."""
        if self.memory is not None:
            self.memory.reduce_to_first(tensor)
        elif self.size > 1:
            with self.clock.waiting():
                dist.reduce(tensor, self.ranks[0], group=self.handle)

    def broadcast_from_first(self, tensor: Tensor) -> None:
        """Give every rank the `tensor` of the first."""
        if self.memory is not None:
            self.memory.broadcast_from_first(tensor)
        elif self.size > 1:
            with self.clock.waiting():
                dist.broadcast(tensor, self.ranks[0], group=self.handle)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's `tensor`, in the order of the group."""
        if self.size == 1:
            return [tensor]
        if self.memory is not None:
            return self.memory.all_gather(tensor)
        gathered = [torch.empty_like(tensor) for _ in self.ranks]
        with self.clock.waiting():
            dist.all_gather(gathered, tensor, group=self.handle)
        return gathered

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> None:
        """Fill `shard` with this rank's shard of `whole`, summed over the group.

        `whole` is `size` shards of equal length, in the order of the group; `shard` may be this rank's of them.
        """
        self.begin_reduce_scatter(shard, whole)()

    def begin_reduce_scatter(self, shard: Tensor, whole: Tensor) -> Finish:
        """Begin `reduce_scatter`. Until it is finished `whole` has to stay as it is."""
        if self.overlaps:
            shards = shard.view(-1), whole.view(-1)
            return self._timed(begin_reduce_scatter(*shards, self.ranks, self.index, self.handle))
        if self.memory is not None:
            self.memory.reduce_scatter(shard, whole)
        else:
            _copy(shard, whole)
        return done

    def all_gather_into(self, whole: Tensor, shard: Tensor) -> None:
        """Fill `whole` with every rank's `shard`, in the order of the group; `shard` may be a part of `whole`."""
        self.begin_all_gather_into(whole, shard)()

    def begin_all_gather_into(self, whole: Tensor, shard: Tensor) -> Finish:
        """Begin `all_gather_into`. Until it is finished `shard` has to stay as it is."""
        if self.overlaps:
            return self._timed(begin_all_gather(whole.view(-1), shard.view(-1), self.ranks, self.index, self.handle))
        if self.memory is not None:
            self.memory.all_gather_into(whole, shard)
        else:
            _copy(whole, shard)
        return done

    def begin_shift(self, tensor: Tensor) -> tuple[Tensor, Finish]:
        """Begin to pass `tensor` on to the next rank of the group, round in a ring.

        The first of what comes back is the tensor of the rank before, once the second has been called; until then
        `tensor` has to stay as it is.
        """
        arrived = torch.empty_like(tensor)
        if self.overlaps:
            return arrived, self._timed(begin_shift(tensor, arrived, self.ranks, self.index, self.handle))
        if self.memory is not None:
            self.memory.shift(tensor, arrived)
        else:
            _copy(arrived, tensor)
        return arrived, done

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """(size, ..) of a part for each rank -> (size, ..) of the parts from each rank for this one."""
        if self.size == 1:
            return tensor
        arrived = torch.empty_like(tensor)
        if self.memory is not None:
            self.memory.all_to_all(arrived, tensor)
        else:
            with self.clock.waiting():
                dist.all_to_all_single(arrived, tensor, group=self.handle)
        return arrived

    def begin_all_to_all(self, tensor: Tensor) -> tuple[Tensor, Finish]:
        """Begin `all_to_all`: the first of what comes back is there once the second has been called."""
        if not self.overlaps:
            return self.all_to_all(tensor), done
        arrived = torch.empty_like(tensor)
        work = dist.all_to_all_single(arrived, tensor, group=self.handle, async_op=True)
        return arrived, self._timed(finish_all([work]))

    def exchange_rows(self, rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """What every rank sends here, (received, ..): `counts[i][j]` rows go from rank i to rank j.

        `rows` (sent, ..) are in the order of the ranks that they go to, those returned of the ranks they come from.
        """
        if self.size == 1:
            return rows
        splits = [sent[self.index] for sent in counts]
        received, rows = rows.new_empty(sum(splits), *rows.shape[1:]), rows.contiguous()
        if self.memory is not None:
            width = math.prod(rows.shape[1:])
            self.memory.exchange(received, rows, [[count * width for count in sent] for sent in counts])
        else:
            with self.clock.waiting():
                dist.all_to_all_single(received, rows, splits, list(counts[self.index]), group=self.handle)
        return received

    def _timed(self, finish: Finish) -> Finish:
        def timed() -> None:
            with self.clock.waiting():
                finish()

        return timed


def _copy(to: Tensor, source: Tensor) -> None:
    """Copy a tensor, unless both are the same memory."""
    if to.data_ptr() != source.data_ptr():
        to.view(-1).copy_(source.view(-1))


def all_reduce_together(group: Group, tensors: Sequence[Tensor]) -> None:
    """Sum each of many small tensors over the group, in place, by one collective."""
    if group.size > 1 and tensors:
        together = torch.cat([tensor.reshape(-1) for tensor in tensors])
        group.all_reduce(together)
        for tensor, summed in zip(tensors, torch.split(together, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))


class GroupFactory:
    """Makes process groups once each. Every rank of the world must ask for the same groups in the same order.

    CPU ranks that share a machine communicate through its memory. `clock` counts how long this rank waits in all of
    them.
    """

    def __init__(self, device: torch.device, clock: WaitClock | None = None) -> None:
        self._clock = clock or WaitClock()
        self._groups: dict[tuple[bool, tuple[int, ...]], Group | None] = {}
        self._on_cpu = device.type == "cpu"

    def get(self, ranks: tuple[int, ...], me: int, *, returning: bool = False, beside: bool = False) -> Group | None:
        """The group of `ranks`, or None where `me` is not one of them.

        `returning` asks for the group of what goes back down a pipeline. On NCCL it is a second group of the same
        ranks, since there all sends and receives between two ranks of a group wait in one line. `beside` asks for a
        second one anywhere, whose collectives go on for steps beside those of the first.
        """
        second = beside or (returning and not self._on_cpu)
        if (second, ranks) not in self._groups:
            self._groups[second, ranks] = self._make(ranks, me, second=second)
        return self._groups[second, ranks]

    def _make(self, ranks: tuple[int, ...], me: int, *, second: bool) -> Group | None:
        if len(ranks) == 1:
            return Group(ranks, 0, None, clock=self._clock) if me in ranks else None
        whole_world = ranks == tuple(range(dist.get_world_size()))
        name = f"ranks {','.join(map(str, ranks))}"
        handle = dist.group.WORLD
        if second or not whole_world:
            # NCCL's own is 10 minutes, and stages wait for each other's first weights
            handle = dist.new_group(list(ranks), timeout=RENDEZVOUS_TIMEOUT, group_desc=name)
        if me not in ranks:
            return None
        index = ranks.index(me)
        memory = share_memory(index, len(ranks), handle, self._clock) if self._on_cpu else None
        return Group(ranks, index, handle, memory, clock=self._clock)
