"""Mesh: which ranks a rank talks to along each axis of the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.layout.layout import Axis, Layout
from trimaran.train.comm.exchange import Finish, begin_gather, begin_scatter_sum, done, finish_all
from trimaran.train.comm.shared_memory import SharedMemory, share_memory


@dataclass(frozen=True)
class Group:
    """Ranks that act together, in order; `index` is the own place among them.

    `slices_sequence` says of a TP group that its ranks keep a slice of the sequence each, wherever they would
    otherwise all do the same: sequence parallelism.
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    memory: SharedMemory | None = None
    slices_sequence: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def sum_(self, tensor: Tensor) -> None:
        """Sum `tensor` over the group, in place."""
        if self.memory is not None:
            self.memory.sum_(tensor)
        elif self.size > 1:
            dist.all_reduce(tensor, group=self.handle)

    @property
    def overlaps(self) -> bool:
        """Whether what is begun goes on beside computing. Through shared memory it is done at once."""
        return self.size > 1 and self.memory is None

    def begin_sum(self, tensor: Tensor) -> Finish:
        """Begin to sum `tensor` over the group, in place."""
        if self.overlaps:
            return finish_all([dist.all_reduce(tensor, group=self.handle, async_op=True)])
        self.sum_(tensor)
        return done

    def sum_to_first_(self, tensor: Tensor) -> None:
        """Sum `tensor` over the group, in place on its first rank; the others' holds nothing of use then."""
        if self.memory is not None:
            self.memory.sum_to_first_(tensor)
        elif self.size > 1:
            dist.reduce(tensor, self.ranks[0], group=self.handle)

    def broadcast_first_(self, tensor: Tensor) -> None:
        """Give every rank the `tensor` of the first."""
        if self.memory is not None:
            self.memory.broadcast_first_(tensor)
        elif self.size > 1:
            dist.broadcast(tensor, self.ranks[0], group=self.handle)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's `tensor`, in the order of the group."""
        if self.size == 1:
            return [tensor]
        if self.memory is not None:
            return self.memory.gather(tensor)
        gathered = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(gathered, tensor, group=self.handle)
        return gathered

    def scatter_sum(self, own: Tensor, whole: Tensor) -> None:
        """Own = this rank's part of `whole`, summed over the group: reduce-scatter.

        `whole` is `size` parts of own's length, in the order of the group. `own` may be its part of `whole`.
        """
        self.begin_scatter_sum(own, whole)()

    def begin_scatter_sum(self, own: Tensor, whole: Tensor) -> Finish:
        """Begin `scatter_sum`. Until it is finished `whole` has to stay as it is."""
        if self.overlaps:
            return begin_scatter_sum(own.view(-1), whole.view(-1), self.ranks, self.index, self.handle)
        if self.memory is not None:
            self.memory.scatter_sum(own, whole)
        else:
            own.view(-1).copy_(whole.view(-1))
        return done

    def gather_into(self, whole: Tensor, own: Tensor) -> None:
        """Whole = every rank's `own`, in the order of the group: all-gather. `own` may be its part of `whole`."""
        self.begin_gather_into(whole, own)()

    def begin_gather_into(self, whole: Tensor, own: Tensor) -> Finish:
        """Begin `gather_into`. Until it is finished `own` has to stay as it is."""
        if self.overlaps:
            return begin_gather(whole.view(-1), own.view(-1), self.ranks, self.index, self.handle)
        if self.memory is not None:
            self.memory.gather_into(whole, own)
        else:
            whole.view(-1).copy_(own.view(-1))
        return done


def sum_together(group: Group, tensors: Sequence[Tensor]) -> None:
    """Sum each of many small tensors over the group, in place, by one collective."""
    if group.size > 1 and tensors:
        together = torch.cat([tensor.reshape(-1) for tensor in tensors])
        group.sum_(together)
        for tensor, summed in zip(tensors, torch.split(together, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))


class GroupFactory:
    """Makes process groups once each. Every rank of the world must ask for the same ones in the same order.

    Groups of CPU ranks that share a machine speak through its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._groups: dict[tuple[bool, tuple[int, ...]], Group | None] = {}
        self._on_cpu = device.type == "cpu"

    def get(self, ranks: tuple[int, ...], me: int, *, returning: bool = False) -> Group | None:
        """The group of `ranks`, or None where `me` is not one of them.

        `returning` asks for the group for what goes back down a pipeline. On NCCL it is
        one of its own, since there the sends and receives of two ranks wait in one line.
        """
        key = (returning and not self._on_cpu, ranks)
        if key not in self._groups:
            self._groups[key] = self._make(ranks, me, apart=key[0])
        return self._groups[key]

    def _make(self, ranks: tuple[int, ...], me: int, *, apart: bool) -> Group | None:
        if len(ranks) == 1:
            return Group(ranks, 0, None) if me in ranks else None
        whole_world = ranks == tuple(range(dist.get_world_size()))
        named = f"ranks {','.join(map(str, ranks))}"
        handle = dist.group.WORLD if whole_world and not apart else dist.new_group(list(ranks), group_desc=named)
        if me not in ranks:
            return None
        index = ranks.index(me)
        return Group(ranks, index, handle, share_memory(index, len(ranks), handle) if self._on_cpu else None)


@dataclass(frozen=True)
class Mesh:
    """The groups of one rank: all ranks of the run, and those along each axis.

    `tied` joins the first and the last stage, which both hold the tied embedding; what goes to a lower rank of
    the pipeline goes through `pp_returning`.
    """

    world: Group
    tp: Group
    dp: Group
    pp: Group
    pp_returning: Group
    tied: Group

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp.index == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head and sees the loss."""
        return self.pp.index == self.pp.size - 1


def _axis_groups(layout: Layout, axis: Axis) -> list[tuple[int, ...]]:
    """All groups along `axis`, as ranks 0 .. devices-1."""
    degrees: dict[Axis, int] = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp}
    spans = {name: range(1 if name == axis else degree) for name, degree in degrees.items()}
    stride = layout.stride(axis)
    first_ranks = (layout.rank_of(dp, tp, pp) for pp in spans["pp"] for dp in spans["dp"] for tp in spans["tp"])
    return [tuple(first + k * stride for k in range(degrees[axis])) for first in first_ranks]


def build_mesh(layout: Layout, me: int, ranks: Sequence[int], factory: GroupFactory) -> Mesh | None:
    """The mesh of global rank `me`, the layout being laid on `ranks` in order.

    Every rank of the world has to call this, members or not; those outside get None.
    """

    def mine(groups: list[tuple[int, ...]], *, returning: bool = False) -> Group | None:
        found = [factory.get(tuple(ranks[r] for r in group), me, returning=returning) for group in groups]
        return next((group for group in found if group is not None), None)

    world = mine([tuple(range(layout.devices))])
    tp, dp = mine(_axis_groups(layout, "tp")), mine(_axis_groups(layout, "dp"))
    pipelines = _axis_groups(layout, "pp")
    pp, pp_returning = mine(pipelines), mine(pipelines, returning=True)
    tied = mine([(group[0], group[-1]) if layout.pp > 1 else group for group in pipelines])
    if world is None or tp is None or dp is None or pp is None or pp_returning is None:
        return None
    alone = Group((me,), 0, None)
    tp = replace(tp, slices_sequence=layout.sequence_parallel)
    return Mesh(world=world, tp=tp, dp=dp, pp=pp, pp_returning=pp_returning, tied=tied or alone)
