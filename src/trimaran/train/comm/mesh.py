"""Mesh: which ranks a rank talks to along each axis of the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trimaran.layout.axes import DEGREES, AxisName, groups
from trimaran.layout.layout import Layout
from trimaran.train.comm.group import Group, GroupFactory


@dataclass(frozen=True)
class Mesh:
    """The groups of one rank: all ranks of the run, and those along each axis.

    `tied` joins the first and the last stage, which both hold the tied embedding; what goes to a lower rank of
    the pipeline goes through `pp_returning`.
    """

    world: Group
    along: Mapping[AxisName, Group]
    pp_returning: Group
    tied: Group

    @property
    def tp(self) -> Group:
        """Ranks that share every layer's weights."""
        return self.along["tp"]

    @property
    def dp(self) -> Group:
        """Replicas."""
        return self.along["dp"]

    @property
    def pp(self) -> Group:
        """Stages of one pipeline."""
        return self.along["pp"]

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp.index == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head and sees the loss."""
        return self.pp.index == self.pp.size - 1


def build_mesh(layout: Layout, me: int, ranks: Sequence[int], factory: GroupFactory) -> Mesh | None:
    """The mesh of global rank `me`, the layout being laid on `ranks` in order.

    Every rank of the world has to call this, members or not; those outside get None.
    """

    def mine(all_ranks: list[tuple[int, ...]], *, returning: bool = False) -> Group | None:
        made = [factory.get(tuple(ranks[r] for r in members), me, returning=returning) for members in all_ranks]
        return next((group for group in made if group is not None), None)

    world = mine(groups(layout, *DEGREES))
    along = {axis: group for axis in DEGREES if (group := mine(groups(layout, axis))) is not None}
    pipelines = groups(layout, "pp")
    pp_returning = mine(pipelines, returning=True)
    tied = mine([(group[0], group[-1]) if layout.pp > 1 else group for group in pipelines])
    if world is None or pp_returning is None or len(along) < len(DEGREES):
        return None
    along["tp"] = replace(along["tp"], slices_sequence=layout.sequence_parallel)
    return Mesh(world=world, along=along, pp_returning=pp_returning, tied=tied or Group((me,), 0, None))
