"""Axes: one arithmetic of sizes, strides, groups and coordinates, for a layout and for a grid of them."""

from __future__ import annotations

from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from trimaran.api import workload_of
from trimaran.cost.grid import LayoutGrid
from trimaran.files.catalogue import load_stack
from trimaran.layout.axes import (
    AXES,
    DEGREES,
    EXPERT_AXES,
    PARTS,
    PLACEMENTS,
    devices_of,
    full_placement,
    groups,
    in_words,
    stated_placement,
)
from trimaran.layout.layout import Layout

NAMES = (*DEGREES, *PARTS["dp"])
layouts = st.builds(
    Layout, dp=st.integers(1, 5), tp=st.integers(1, 4), cp=st.integers(1, 3), pp=st.integers(1, 4),
    zero_stage=st.integers(0, 3),
    dp_kind=st.sampled_from(["all_reduce", "fully_sharded"]), placement=st.sampled_from(PLACEMENTS),
)  # fmt: skip


@given(layouts)
def test_a_rank_is_its_coordinates_times_their_strides(layout: Layout) -> None:
    for rank in range(layout.devices):
        assert rank == sum(layout.coordinate(axis, rank) * layout.stride(axis) for axis in DEGREES)


@given(layouts, st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
def test_groups_share_out_all_ranks_and_differ_along_their_axes_alone(layout: Layout, axes: list[str]) -> None:
    found = groups(layout, *axes)
    assert sorted(chain.from_iterable(found)) == list(range(layout.devices))
    along = {part for axis in axes for part in PARTS.get(axis, (axis,))}
    others = [part for axis in DEGREES for part in PARTS.get(axis, (axis,)) if part not in along]
    for ranks in found:
        assert len(ranks) == layout.fold(*along)
        assert list(ranks) == sorted(ranks)
        assert all(len({layout.coordinate(other, rank) for rank in ranks}) == 1 for other in others)
    if len(axes) == 1:
        steps = {after - before for ranks in found for before, after in pairwise(ranks)}
        assert steps <= {layout.stride(axes[0])}


@given(layouts)
def test_replicas_are_those_that_share_out_times_those_that_hold_the_same(layout: Layout) -> None:
    assert layout.fold("replicate", "shard") == layout.dp
    shares = layout.zero_stage > 0
    assert layout.size("shard") == (layout.dp if shares else 1)
    assert groups(layout, "replicate", "shard") == groups(layout, "dp")


@st.composite
def hybrid_layouts(draw: st.DrawFn) -> Layout:
    """Layouts of which a part of the replicas share out what ZeRO shards."""
    shard = draw(st.integers(1, 4))
    return draw(layouts).model_copy(update={"dp": shard * draw(st.integers(1, 3)), "shard": shard, "zero_stage": 1})


@given(hybrid_layouts())
def test_shards_lie_inside_their_copies(layout: Layout) -> None:
    assert layout.fold("replicate", "shard") == layout.dp
    assert layout.size("shard") == layout.shard
    assert layout.stride("replicate") == layout.stride("shard") * layout.shard
    assert groups(layout, "replicate", "shard") == groups(layout, "dp")


@st.composite
def expert_layouts_of(draw: st.DrawFn, plain: st.SearchStrategy[Layout]) -> Layout:
    """Layouts whose experts are laid over the ranks of a stage without a rest."""
    layout = draw(plain)
    ranks = layout.fold("dp", "cp", "tp")
    etp = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, ranks // etp + 1) if ranks // etp % n == 0]))
    return layout.model_copy(update={"ep": ep, "etp": etp})


def expert_layouts() -> st.SearchStrategy[Layout]:
    """Such layouts whose replicas are of no parts."""
    return expert_layouts_of(layouts)


@given(expert_layouts())
def test_experts_are_laid_over_the_ranks_of_each_stage(layout: Layout) -> None:
    assert layout.fold("edp", "ep", "etp") == layout.fold("dp", "cp", "tp")
    assert groups(layout, "edp", "ep", "etp") == groups(layout, "dp", "cp", "tp")
    for axis in EXPERT_AXES:
        found = groups(layout, axis)
        assert sorted(chain.from_iterable(found)) == list(range(layout.devices))
        for ranks in found:
            assert [layout.coordinate(axis, rank) for rank in ranks] == list(range(layout.size(axis)))
        if layout.size(axis) > 1 and layout.pp == 1:
            assert {after - before for ranks in found for before, after in pairwise(ranks)} == {layout.stride(axis)}


@given(st.one_of(expert_layouts(), expert_layouts_of(hybrid_layouts())))
def test_ranks_of_the_same_experts_are_those_that_share_out_times_those_that_hold_the_same(layout: Layout) -> None:
    assert layout.fold("eshard", "ereplicate") == layout.size("edp")
    assert groups(layout, "eshard", "ereplicate") == groups(layout, "edp")
    assert len(groups(layout, "eshard")[0]) == layout.size("eshard")
    if not layout.zero_stage:
        assert layout.size("eshard") == 1
    elif not layout.shard:
        assert layout.size("ereplicate") == 1


def test_experts_are_folded_as_megatron_core_folds_them() -> None:
    # RankGenerator(tp=1, ep=4, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp") beside tp=2, cp=1, dp=4
    layout = Layout(dp=4, tp=2, pp=2, ep=4, etp=1)
    assert groups(layout, "ep") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert groups(layout, "edp") == [(r, r + 4) for r in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert layout.model_copy(update={"etp": 0, "ep": 2}).fold("etp") == 2


def test_a_placement_may_leave_out_axes_that_stand_at_their_usual_place() -> None:
    for placement in PLACEMENTS:
        assert full_placement(stated_placement(placement)) == placement
    assert full_placement(("tp", "pp", "dp")) == ("tp", "cp", "pp", "dp")
    assert Layout(placement=("dp", "tp", "pp")).placement == ("dp", "tp", "cp", "pp")


@given(st.lists(st.one_of(layouts, hybrid_layouts(), expert_layouts()), min_size=1, max_size=6))
def test_a_grid_answers_for_each_of_its_layouts(members: list[Layout]) -> None:
    workload, stack = workload_of("gpt2-124m", 64), load_stack("trimaran")
    grid = LayoutGrid.from_layouts(
        [layout.model_copy(update={"stage_split": (12,)}) for layout in members], workload, stack
    )
    assert grid.devices.tolist() == [layout.devices for layout in members]
    for name in (*NAMES, *EXPERT_AXES):
        assert grid.fold(name).tolist() == [layout.fold(name) for layout in members]
        assert grid.stride(name).tolist() == [layout.stride(name) for layout in members]
        assert grid.coordinate(name, 3).tolist() == [layout.coordinate(name, 3) for layout in members]


@given(layouts)
def test_the_product_of_the_degrees_is_the_devices(layout: Layout) -> None:
    assert devices_of(vars(layout)) == layout.devices
    assert devices_of(vars(layout), without="dp") * layout.dp == layout.devices


def test_a_product_is_written_as_people_write_it() -> None:
    assert in_words({"dp": 8, "tp": 4, "cp": 1, "pp": 12}) == "DP 8 x TP 4 x PP 12"
    assert [axis.title for axis in AXES] == ["DP", "TP", "CP", "PP"]
