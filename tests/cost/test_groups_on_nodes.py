"""Which groups of ranks lie on several nodes, beside an enumeration of all of them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trimaran.cost.calibration import Calibration
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate, estimate_many
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.network import Network, expert_group, group, group_along
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.axes import EXPERT_AXES, PLACEMENTS
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload

H100, MEGATRON = load_cluster("dgx-h100"), load_stack("megatron-core")
MIXTURE = Model(layers=12, hidden=512, heads=8, vocab=1000, experts=24, top_k=2, moe_ffn_hidden=64, bias=False)
WORKLOAD = Workload(model=MIXTURE, seq_len=1024, global_batch=64)
SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 8])
# Axes of a group, and those along which its ranks are all alike.
DENSE = {("tp",): ("cp", "pp", "dp"), ("cp",): ("tp", "pp", "dp"), ("dp",): ("tp", "cp", "pp")} | {
    ("cp", "dp"): ("tp", "pp"), ("cp", "shard"): ("tp", "pp", "replicate"),
}  # fmt: skip


def spans_nodes(layout: Layout, alike: tuple[str, ...], per_node: int) -> bool:
    """Whether some group of ranks that agree in the coordinates `alike` has ranks on two nodes."""
    nodes = defaultdict(set)
    for rank in range(layout.devices):
        nodes[tuple(layout.coordinate(axis, rank) for axis in alike)].add(rank // per_node)
    return any(len(of_group) > 1 for of_group in nodes.values())


@settings(max_examples=300)
@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from(PLACEMENTS), st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.data())
def test_a_group_crosses_nodes_where_some_like_it_does(
    dp: int, tp: int, cp: int, pp: int, placement: tuple[str, ...], per_node: int, data: st.DataObject
) -> None:
    shard = data.draw(st.sampled_from([size for size in range(1, dp + 1) if dp % size == 0]))
    layout = Layout(dp=dp, tp=tp, cp=cp, pp=pp, shard=shard, zero_stage=1, placement=placement)
    cluster = H100.model_copy(update={"devices_per_node": per_node, "nodes": -(-layout.devices // per_node)})
    grid = LayoutGrid.from_layouts([layout], WORKLOAD, MEGATRON)
    for axes, alike in DENSE.items():
        assert bool(group_along(grid, cluster, *axes).crosses[0]) == spans_nodes(layout, alike, per_node), axes


@settings(max_examples=200)
@given(SIZES, SIZES, SIZES, st.sampled_from([2, 3, 4, 6]), st.sampled_from([2, 3, 4, 6, 8, 16]))
def test_a_group_of_experts_crosses_nodes_where_some_like_it_does(
    dp: int, tp: int, pp: int, ep: int, per_node: int
) -> None:
    assume(dp * tp % ep == 0)
    layout = Layout(dp=dp, tp=tp, pp=pp, ep=ep, etp=1)
    cluster = H100.model_copy(update={"devices_per_node": per_node, "nodes": -(-layout.devices // per_node)})
    grid = LayoutGrid.from_layouts([layout], WORKLOAD, MEGATRON)
    for axis in ("ep", "edp"):
        alike = ("pp", *(other for other in EXPERT_AXES if other != axis))
        assert bool(expert_group(grid, cluster, axis).crosses[0]) == spans_nodes(layout, alike, per_node), axis


def test_replicas_that_nodes_cut_are_told_as_where_they_stand() -> None:
    """Two pipelines of three ranks on nodes of four: two of three rings cross, which no node-sized span tells."""
    cluster = load_cluster("aws-p3-16xlarge").model_copy(update={"devices_per_node": 4, "nodes": 2})
    cluster = cluster.model_copy(update={"inter": cluster.inter.model_copy(update={"bandwidth_gbps": 25.0})})
    workload = Workload(model=load_model("gpt2-355m"), seq_len=1024, global_batch=64)
    case, text = Case.of(workload, cluster, load_stack("trimaran")), "dp2,pp3,mbs4,zero1,fp16,place-tp-pp-dp"
    plain, placed = (estimate(case, parse_layout(text + more)) for more in ("", ",on0-5"))
    assert plain.time.dp >= placed.time.dp
    assert plain.sec_per_it == pytest.approx(placed.sec_per_it, rel=0.2)


def test_a_ring_of_lone_ranks_of_nodes_passes_one_border_less_than_it_has() -> None:
    """From each of two nodes of one device a gather's bytes go to the other; of a ring of three they go twice."""
    cluster = load_cluster("aws-p3-2xlarge")
    network = Network(cluster, Calibration())
    ranks = np.array([2, 3])
    seconds = network.all_gather(np.zeros(2), group(ranks, np.ones(2, np.int64), ranks, cluster))
    hops = (seconds - Calibration().collective_us * 1e-6) / (cluster.inter.latency_us * 1e-6)
    assert hops.tolist() == pytest.approx([1.0, 2.0])


def test_a_layout_on_two_nodes_is_priced_alike_alone_and_beside_the_same_on_more() -> None:
    """Groups of 6 meet one border of a node of 8 where there are two nodes, and two where there are more."""
    model = Model(layers=12, hidden=768, heads=12, vocab=1000)
    workload = Workload(model=model, seq_len=1024, global_batch=32)
    case = Case.of(workload, H100, MEGATRON)
    layouts = [parse_layout(f"dp{dp},tp6,mbs1,bf16") for dp in (2, 4)]
    many = estimate_many(case, LayoutGrid.from_layouts(layouts, workload, MEGATRON))
    assert many.sec_per_it.tolist() == [estimate(case, layout).sec_per_it for layout in layouts]
