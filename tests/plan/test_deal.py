"""Micro-batches dealt out by the speed of replicas: where it pays, and never for a slower plan."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import check_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.hardware.node_group import GroupLink, NodeGroup
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import Workload
from trimaran.planner.export.exporters import export
from trimaran.planner.placement.deal import dealt
from trimaran.planner.placement.place import Placing, place
from trimaran.planner.planner import plan

MODEL = load_model("gpt3-xl").model_copy(update={"head": "vocabulary"})
NEAR = Link(bandwidth_gbps=100, latency_us=5)


def nodes_at(speed: float, nodes: int, name: str) -> NodeGroup:
    """Nodes of one device that computes and moves at a share of the speed of a V100."""
    device = load_cluster("aws-p3-2xlarge").device
    slowed = {
        "name": f"{device.name} at {speed}",
        "peak_tflops": {rate: tflops * speed for rate, tflops in device.peak_tflops.items()},
        "mem_bandwidth_gb_s": device.mem_bandwidth_gb_s * speed,
        "mem_gib": 80.0,
    }
    at_speed = device.model_copy(update=slowed)
    return NodeGroup(name=name, device=at_speed, nodes=nodes, devices_per_node=1, intra=NEAR, inter=NEAR)


def case_of(fast: int, slow: int, speed: float = 0.5, batch: int = 48, stack: str = "trimaran") -> Case:
    groups = [nodes_at(1.0, fast, "fast"), nodes_at(speed, slow, "slow")]
    between = GroupLink(between=("fast", "slow"), bandwidth_gbps=100, latency_us=5)
    cluster = Cluster.of_groups(groups, [between], name="two speeds")
    return Case.of(Workload(model=MODEL, seq_len=2048, global_batch=batch), cluster, load_stack(stack))


def test_replicas_of_half_speed_are_dealt_half_as_many_micro_batches() -> None:
    case = case_of(2, 2)
    layout = parse_layout("dp4,mbs1,fp16,recompute-full")
    found = place(case, layout)
    on_slow = [device >= 2 for device in found.layout.placed]
    assert sorted(zip(on_slow, found.layout.replica_batches, strict=True)) == [(False, 16)] * 2 + [(True, 8)] * 2
    as_many = Placing(case, layout)
    # 16 at full speed in place of 12 at half speed; replicas agree on gradients in the same time
    assert found.seconds < 0.75 * as_many.seconds
    assert found.least_s <= found.seconds
    assert estimate(case, found.layout).sec_per_it == pytest.approx(found.seconds)
    check_layout(found.layout, case.workload, case.cluster, case.stack)


@pytest.mark.parametrize("degrees", ["dp2,pp2", "dp2,pp2,gpipe", "dp2,pp2,vpp2", "dp2,pp2,zero_bubble", "dp4,zero1"])
def test_a_deal_is_a_valid_layout_that_is_no_slower_than_as_many_for_all(degrees: str) -> None:
    case = case_of(2, 2)
    layout = parse_layout(f"{degrees},mbs1,fp16,recompute-full")
    placing, as_many = Placing(case, layout), Placing(case, layout)
    placing.deal()
    assert placing.seconds < 0.95 * as_many.seconds
    assert sum(placing.best.replica_batches) == 48
    check_layout(placing.best, case.workload, case.cluster, case.stack)


@pytest.mark.parametrize("text", ["dp4,mbs1,fp16,zero2", "dp4,mbs1,fp16,fsdp", "dp4,mbs1,fp16"])
def test_where_replicas_take_as_many_no_deal_is_made(text: str) -> None:
    stack = "trimaran" if "," in text.removeprefix("dp4,mbs1,fp16") else "gpipe"
    placing = Placing(case_of(2, 2, stack=stack), parse_layout(text))
    placing.deal()
    assert placing.best.replica_batches == ()
    alike = place(case_of(2, 2, speed=1.0), parse_layout("dp4,mbs1,fp16"))
    assert alike.layout.replica_batches == ()


@pytest.mark.proof
@given(
    st.sampled_from(["dp2", "dp3", "dp2,pp2", "dp4", "dp2,pp2,gpipe", "dp2,pp2,vpp2"]),
    st.sampled_from([0.25, 0.5, 0.8]),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=15)
def test_no_placement_of_a_deal_is_below_its_bound(degrees: str, speed: float, seed: int) -> None:
    case = case_of(2, 2, speed, 24)
    placing = Placing(case, parse_layout(f"{degrees},mbs1,fp16,recompute-full"))
    before = placing.seconds
    placing.improve()
    assert placing.seconds <= before
    random = np.random.default_rng(seed)
    for _ in range(10):
        nodes = placing.blocks.nodes(placing.layout, random.permutation(len(placing.blocks)))
        assert placing.least_s <= placing.cost.seconds(nodes) * (1 + 1e-9)


@pytest.mark.parametrize("text", ["dp3,mbs1,fp16,recompute-full", "dp2,pp2,mbs1,fp16,recompute-full"])
@pytest.mark.parametrize("speed", [0.3, 0.6])
def test_a_deal_is_the_best_of_all_where_few_are_possible(text: str, speed: float) -> None:
    case, layout = case_of(2, 2, speed, 12), parse_layout(text)
    cost = PlacedCost(case, layout)
    nodes = np.arange(layout.dp * layout.pp).reshape(layout.dp, layout.pp)
    every = [deal for deal in product(range(1, 12), repeat=layout.dp) if sum(deal) == 12]
    seconds = {deal: cost.replica_seconds(nodes, deal).max() for deal in every}
    assert seconds[dealt(cost, nodes)] <= min(seconds.values()) * 1.02


@pytest.mark.parametrize("to", ["megatron-lm", "torchtitan", "deepspeed", "megatron-deepspeed"])
def test_no_other_trainer_is_written_for(to: str) -> None:
    case, layout = case_of(1, 1), parse_layout("dp2,mbs1,fp16,batches31-17")
    with pytest.raises(TrimaranError, match="no setting for replicas with unlike numbers of micro-batches"):
        export(layout, case.workload, case.stack, to)


@pytest.mark.proof
def test_a_plan_on_a_cluster_with_a_slow_group_deals_micro_batches_out() -> None:
    case = case_of(4, 4, batch=96)
    held = {"tp": 1, "pp": 1, "cp": 1, "mbs": 1, "recompute": "full", "precision": "fp16"}
    unlike = plan(case.workload, case.cluster, case.stack, top=3, fixed=held)
    batches = unlike.best.layout.replica_batches
    assert sum(batches) == 96 and max(batches) == pytest.approx(2 * min(batches), abs=2)
    plain = case.stack.model_copy(update={"unlike_replicas": False})
    as_many = plan(case.workload, case.cluster, plain, top=3, fixed=held)
    assert as_many.best.layout.replica_batches == ()
    assert unlike.best.sec_per_it < 0.85 * as_many.best.sec_per_it


def test_micro_batches_are_made_smaller_where_there_are_too_few_to_deal_out() -> None:
    case = case_of(4, 4, batch=64)
    held = {"tp": 1, "pp": 1, "cp": 1, "dp": 8, "precision": "fp16"}
    plain = case.stack.model_copy(update={"unlike_replicas": False})
    unlike, as_many = (
        plan(case.workload, case.cluster, stack, top=3, fixed=held).best for stack in (case.stack, plain)
    )
    assert as_many.layout.micro_batches(64) <= 2
    assert len(set(unlike.layout.replica_batches)) > 1
    assert unlike.sec_per_it < 0.9 * as_many.sec_per_it
    # a micro-batch that is held stays as it is
    held["mbs"] = as_many.layout.mbs
    assert plan(case.workload, case.cluster, case.stack, top=1, fixed=held).best.layout.mbs == as_many.layout.mbs
