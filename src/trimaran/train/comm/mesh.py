"""Mesh: which ranks a rank talks to along each axis of the layout, and which hold the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trimaran.layout.axes import DEGREES, groups
from trimaran.layout.layout import Layout
from trimaran.train.comm.group import Group, GroupFactory
from trimaran.train.comm.sequence_share import SequenceShare

# Weights of one kind are held by the same ranks.
WeightKind = Literal["dense", "experts"]


@dataclass(frozen=True)
class Holders:
    """The ranks that hold weights of one kind, as one of them sees the others.

    `cut` are the ranks among which each matrix is cut (TP, or experts' own: ETP), `dealt` those over which experts are
    dealt out, by dimension 0 (EP; of other weights this rank alone). Ranks that hold the same part of it each see other
    tokens, and sum its gradients: `sharers` share out what ZeRO shards, so that each owns an equal part of every unit,
    and `copies` own the same part. The first of the copies owns everything where it `serves` the others (parameter
    server).
    """

    cut: Group
    dealt: Group
    sharers: Group
    copies: Group
    serves: bool = False

    @property
    def overlaps(self) -> bool:
        """Whether a sum of gradients that was begun goes on beside computing."""
        return self.sharers.overlaps or self.copies.overlaps


@dataclass(frozen=True)
class Mesh:
    """The groups of one rank: all ranks of the run, those along each axis, and the holders of its weights by kind.

    `sequence` says which tokens of each sequence are this rank's. `tied` joins the first and the last stage, which both
    hold the tied embedding; what goes to a lower rank of the pipeline goes through `pp_returning`.
    """

    world: Group
    along: Mapping[str, Group]
    holders: Mapping[WeightKind, Holders]
    sequence: SequenceShare
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
    def ep(self) -> Group:
        """Ranks among which the experts of every layer are dealt out."""
        return self.along["ep"]

    @property
    def etp(self) -> Group:
        """Ranks that share the weights of the same experts."""
        return self.along["etp"]

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

    def mine(all_ranks: list[tuple[int, ...]], *, returning: bool = False, beside: bool = False) -> Group | None:
        made = [
            factory.get(tuple(ranks[r] for r in members), me, returning=returning, beside=beside)
            for members in all_ranks
        ]
        return next((group for group in made if group is not None), None)

    world = mine(groups(layout, *DEGREES))
    axes = (*DEGREES, "ep", "etp")
    along = {axis: group for axis in axes if (group := mine(groups(layout, axis))) is not None}
    serves = layout.dp_kind == "parameter_server"
    # ranks that share sequences hold the same weights, and share them out as replicas do
    shares = layout.zero_stage > 0 and not serves
    sharers = mine(groups(layout, *(("cp", "shard") if shares else ())))
    # a sum that has steps to arrive holds up no other
    beside = layout.outer_delay > 0
    copies = mine(groups(layout, *(("replicate",) if shares else ("cp", "dp"))), beside=beside)
    expert_sharers = mine(groups(layout, *(("eshard",) if shares else ())))
    expert_copies = mine(groups(layout, *(("ereplicate",) if shares else ("edp",))))
    pipelines = groups(layout, "pp")
    pp_returning = mine(pipelines, returning=True)
    tied = mine([(group[0], group[-1]) if layout.pp > 1 else group for group in pipelines])
    if world is None or pp_returning is None or sharers is None or copies is None or len(along) < len(axes):
        return None
    assert expert_sharers is not None and expert_copies is not None, "every rank holds experts, if any"
    alone = Group((me,), 0, None)
    along["tp"] = replace(along["tp"], slices_sequence=layout.sequence_parallel)
    return Mesh(
        world=world,
        along=along,
        holders={
            "dense": Holders(along["tp"], alone, sharers, copies, serves),
            "experts": Holders(along["etp"], along["ep"], expert_sharers, expert_copies, serves),
        },
        sequence=SequenceShare(along["cp"], layout.cp_kind),
        pp_returning=pp_returning,
        tied=tied or alone,
    )


def lone_mesh() -> Mesh:
    """The mesh of a rank that has no others."""
    one = Group((0,), 0, None)
    holders = Holders(cut=one, dealt=one, sharers=one, copies=one)
    return Mesh(
        world=one,
        along=dict.fromkeys((*DEGREES, "ep", "etp"), one),
        holders={"dense": holders, "experts": holders},
        sequence=SequenceShare(one),
        pp_returning=one,
        tied=one,
    )
