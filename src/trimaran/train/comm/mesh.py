"""Mesh: which ranks a rank talks to along each axis of the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimaran.layout.layout import Axis, Layout
from trimaran.train.comm.group import Group, GroupFactory


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
