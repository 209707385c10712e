"""Layouts on given devices, held against the cost of alike nodes where they are, and the player of schedules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate, estimate_each
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.kernels import slowdowns
from trimaran.cost.pipeline.closed_form import pipeline_runs
from trimaran.cost.pipeline.lockstep import ends, play
from trimaran.cost.placed.placed_cost import PlacedCost
from trimaran.cost.placed.placed_estimate import stage_limits
from trimaran.cost.simulate import pipeline_run, simulate
from trimaran.cost.stage_work import stage_work
from trimaran.files.catalogue import load_cluster, load_device, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.hardware.measured import Contention
from trimaran.nouns.hardware.node_group import GroupLink, NodeGroup
from trimaran.nouns.model import Model, padded_vocab
from trimaran.nouns.shaped_network import ShapedNetwork, ShapedNode
from trimaran.nouns.workload import Workload

MODEL = load_model("gpt3-xl")


def case_on(cluster: Cluster, stack: str = "gpipe", global_batch: int = 64, model: Model = MODEL) -> Case:
    workload = Workload(model=model, global_batch=global_batch, seq_len=2048)
    return Case.of(workload, cluster, load_stack(stack))


def nodes_of_one(nodes: int, gbps: float = 5.0, delay_us: float = 1000.0, name: str = "here") -> NodeGroup:
    device = load_cluster("aws-p3-2xlarge").device
    links = {"intra": Link(bandwidth_gbps=100, latency_us=5), "inter": Link(bandwidth_gbps=gbps, latency_us=delay_us)}
    return NodeGroup(name=name, device=device, nodes=nodes, devices_per_node=1, **links)


def nodes_of(devices: int, nodes: int, gbps: float = 5.0, name: str = "here") -> NodeGroup:
    return nodes_of_one(nodes, gbps, name=name).model_copy(update={"devices_per_node": devices})


def far(gbps: float, delay_us: float, **how: bool) -> GroupLink:
    return GroupLink(between=("here", "there"), bandwidth_gbps=gbps, latency_us=delay_us, **how)


@pytest.mark.parametrize(
    ("text", "stack"),
    [
        *((text, "gpipe") for text in (
            "dp4,pp4,mbs1", "dp8,pp2,mbs2,gpipe", "dp16,mbs1", "pp16,mbs1", "dp4,pp4,mbs1,ps",
        )),
        *((f"dp8,pp2,shard4,mbs1,zero{stage}", "trimaran") for stage in (1, 2, 3)),
        ("dp16,shard4,mbs1,zero1", "megatron-core"),
        # groups of ranks that fill several nodes, each of which sends for its own
        *((text, "megatron") for text in ("dp2,tp8,mbs1", "tp8,pp2,mbs1", "dp2,tp4,pp2,mbs1", "tp16,mbs1")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("per_node", [1, 4])
def test_one_group_costs_what_a_cluster_of_alike_nodes_costs(text: str, stack: str, per_node: int) -> None:
    groups = Cluster.of_groups([nodes_of(per_node, 16 // per_node)], ())
    alike = groups.model_copy(update={"groups": ()})
    layout = parse_layout(f"{text},fp16,recompute-full")
    if per_node > 1 and layout.pp == 16:
        return  # of one pipeline's sends some stay inside of nodes, which no send of alike ones does
    plain = case_on(alike, stack)
    grid = LayoutGrid.from_layouts([layout], plain.workload, plain.stack)
    as_one = estimate_each(plain, grid, simulate=True)[0]
    assert estimate(case_on(groups, stack), layout).sec_per_it == pytest.approx(as_one.sec_per_it, rel=1e-6)


@pytest.mark.parametrize("stack", ["trimaran", "megatron-core", "torch-fsdp"])
@pytest.mark.parametrize(("device", "devices"), [("a100-sxm-80gb", "8-15"), ("h100-sxm", "0-7")])
def test_a_group_beside_another_kind_of_device_takes_what_it_takes_alone(stack: str, device: str, devices: str) -> None:
    # devices reach different shares of their peaks, which nobody has measured on either here
    link, wire = Link(bandwidth_gbps=4800, latency_us=5), Link(bandwidth_gbps=400, latency_us=5)
    here, there = (
        NodeGroup(name=name, device=load_device(kind), nodes=1, devices_per_node=8, intra=link, inter=wire)
        for name, kind in (("here", "h100-sxm"), ("there", "a100-sxm-80gb"))
    )
    both = Cluster.of_groups([here, there], [far(100, 10)])
    alone = Cluster.of_groups([here if device == here.device.name else there], ())
    zero = "zero3,fsdp" if stack == "torch-fsdp" else "zero1"
    layout = parse_layout(f"dp8,tp1,pp1,mbs2,{zero},bf16")
    expected = estimate(case_on(alone.model_copy(update={"groups": ()}), stack), layout).sec_per_it
    placed = parse_layout(f"{layout},on{devices}")
    assert estimate(case_on(both, stack), placed).sec_per_it == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding_is_priced_by_the_links_of_its_sharers_and_of_its_copies(stage: int) -> None:
    here_and_there = [nodes_of_one(2, 1.0), nodes_of_one(2, 1.0, name="there")]
    layout = parse_layout(f"dp4,shard2,mbs16,zero{stage},fp32")
    cost = PlacedCost(case_on(Cluster.of_groups(here_and_there, [far(0.1, 30_000)]), "trimaran"), layout)
    alike = PlacedCost(case_on(Cluster.of_groups(here_and_there, [far(1.0, 1000)]), "trimaran"), layout)
    # ranks 0 and 1 share states, and 2 and 3; 0 and 2 hold the same shard, and 1 and 3
    near, copies, sharers, both = (
        of.seconds(np.array(nodes).reshape(4, 1))
        for of, nodes in ((alike, [0, 1, 2, 3]), (cost, [0, 1, 2, 3]), (cost, [0, 2, 1, 3]), (cost, [0, 2, 3, 1]))
    )
    # sharers send twice the bytes of copies, and more often under ZeRO 3
    assert near < copies < sharers < both
    # nothing hides more of traffic this slow, so that what each of the two costs adds up
    assert both - near == pytest.approx((copies - near) + (sharers - near), rel=0.02)


def test_the_ring_that_all_wait_for_is_the_slower_one_for_what_it_sums() -> None:
    """Of two rings of copies one has a thin link and the other a long one; sharers are as near in every placement."""
    layout = parse_layout("dp4,shard2,mbs16,zero1,fp32")
    names, slower = ("a", "b", "c"), set[bool]()
    for delay_us in np.geomspace(50_000, 800_000, 20):
        links = [
            GroupLink(between=pair, bandwidth_gbps=rate, latency_us=delay)
            for pair, rate, delay in (
                (("a", "b"), 100.0, 1000.0), (("a", "c"), 1000.0, float(delay_us)), (("b", "c"), 1000.0, 1000.0)
            )
        ]  # fmt: skip
        groups = [nodes_of_one(2, 1000.0, name=name) for name in names]
        cost = PlacedCost(case_on(Cluster.of_groups(groups, links), "trimaran"), layout)
        thin, long, both = (
            cost.seconds(np.array(nodes).reshape(4, 1)) for nodes in ([0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 2, 4])
        )
        assert both == pytest.approx(max(thin, long), rel=1e-3)
        slower.add(thin > long)
    assert slower == {True, False}


def test_a_tied_embedding_is_summed_over_the_way_between_the_ends_of_the_pipeline() -> None:
    here_and_there = [nodes_of_one(3, 5.0), nodes_of_one(1, 5.0, name="there")]
    tied = MODEL.model_copy(update={"tied_embedding": True, "head": "vocabulary"})
    case = case_on(Cluster.of_groups(here_and_there, [far(0.1, 1000)]), model=tied)
    cost = PlacedCost(case, parse_layout("pp3,mbs1,fp16,recompute-full"))
    inside, middle_far, end_far = (
        cost.parts(np.array([nodes]))[0]["dp"] for nodes in ([0, 1, 2], [0, 3, 1], [0, 1, 3])
    )
    assert inside == pytest.approx(middle_far)
    # two ranks send half of its fp16 gradient to each other twice
    bits = 8 * 2 * padded_vocab(tied.vocab, 1) * tied.hidden
    assert end_far - inside == pytest.approx(bits * (1 / 0.1e9 - 1 / 5e9) / case.calibration.inter_bandwidth, rel=1e-3)


def test_a_cell_that_is_spread_over_groups_fits_on_the_least_of_them() -> None:
    small, large = nodes_of_one(1), nodes_of_one(1, name="there")
    device = large.device.model_copy(update={"mem_gib": 4 * small.device.mem_gib})
    cluster = Cluster.of_groups([small, large.model_copy(update={"device": device})], [far(5.0, 1000)])
    for placed in ((0, 1), (1, 0)):
        layout = parse_layout("tp2,mbs1,fp16").model_copy(update={"placed": placed})
        (limit,) = stage_limits(PlacedCost(case_on(cluster, "megatron-core"), layout))
        assert limit == (small.device.mem_gib, "here")


def test_parts_add_up_and_the_order_of_devices_is_that_of_a_layout_that_names_none() -> None:
    case, layout = (
        case_on(load_cluster("dtfm-world"), global_batch=1024),
        parse_layout("dp8,pp8,mbs1,fp16,recompute-full"),
    )
    found = estimate(case, layout)
    assert sum(found.time.model_dump().values()) == pytest.approx(found.sec_per_it, rel=1e-9)
    named = layout.model_copy(update={"placed": tuple(range(64))})
    assert estimate(case, named) == found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", "interleaved,vpp2"])
def test_each_rank_ends_when_the_player_of_schedules_says(schedule: str) -> None:
    layout = parse_layout(f"pp4,mbs1,{schedule},fp32")
    case = case_on(load_cluster("aws-p3-2xlarge"), "trimaran", 16)
    grid = LayoutGrid.from_layouts([layout], case.workload, case.stack)
    runs = pipeline_runs(grid, stage_work(case, grid).times)
    played = simulate(pipeline_run(case, layout)).events
    last = [max(event.end_s for event in played if event.rank == rank and event.kind != "send") for rank in range(4)]
    assert ends(runs)[0] == pytest.approx(last, rel=1e-9)
    assert play(runs)[0] == pytest.approx(max(last), rel=1e-9)


def test_a_pipeline_across_a_thin_link_waits_for_it_and_a_shared_one_is_slower_still() -> None:
    layout = parse_layout("dp2,pp2,mbs1,fp16,recompute-full,gpipe")
    here_and_there = [nodes_of_one(2), nodes_of_one(2, name="there")]
    near, own = far(5.0, 1000), far(1.0, 20_000)
    across, inside = np.array([[0, 2], [1, 3]]), np.array([[0, 1], [2, 3]])
    seconds = {}
    for name, link in {"near": near, "own": own, "shared": own.model_copy(update={"shared": True})}.items():
        cost = PlacedCost(case_on(Cluster.of_groups(here_and_there, [link])), layout)
        # stages on either side, and then each replica on a side of its own
        seconds[name] = cost.seconds(across), cost.seconds(inside)
    assert seconds["near"][0] == pytest.approx(seconds["near"][1])
    # both sends of a pipeline and both rings cross, and share the line where there is one
    for placed in (0, 1):
        assert seconds["shared"][placed] > seconds["own"][placed] > 1.05 * seconds["near"][placed]


def test_ranks_of_two_nodes_share_the_one_way_between_them() -> None:
    """Eight rings of two, each with an end on either node, cross it at once."""
    cluster = Cluster.of_groups([nodes_of(8, 1, 100.0), nodes_of(8, 1, 100.0, "there")], [far(10.0, 10)])
    alike = cluster.model_copy(update={"groups": (), "links": (), "inter": far(10.0, 10)})
    layout = parse_layout("dp2,pp8,mbs1,fp16,recompute-full,gpipe")
    on = (8 * layout.coordinate("dp", rank) + layout.coordinate("pp", rank) for rank in range(16))
    layout = layout.model_copy(update={"placed": tuple(on)})
    shared, flat = (estimate(case_on(each), layout).time.dp for each in (cluster, alike))
    first = 3 * 12 * MODEL.hidden**2 + MODEL.vocab * MODEL.hidden
    assert shared == pytest.approx(flat)
    assert shared == pytest.approx(2 * first * 16 / (0.9 * 10e9 / 8) / 2, rel=0.05)


def test_ranks_of_one_layer_over_two_groups_cross_between_them_as_often_as_their_ring_does() -> None:
    here_and_there = [nodes_of_one(2, 100.0, 1000), nodes_of_one(2, 100.0, 1000, name="there")]
    layout = parse_layout("tp4,mbs1,fp16,recompute-full")

    def tensor_s(delay_us: float, placed: tuple[int, ...], gbps: float = 100.0) -> float:
        cluster = Cluster.of_groups(here_and_there, [far(gbps, delay_us)])
        return estimate(case_on(cluster, "megatron"), layout.model_copy(update={"placed": placed})).time.tp

    near, twice, always = tensor_s(1000, (0, 1, 2, 3)), tensor_s(50_000, (0, 1, 2, 3)), tensor_s(50_000, (0, 2, 1, 3))
    assert twice - near == pytest.approx((always - near) / 2, rel=1e-6)
    # sums of 64 micro-batches through 24 layers, three times two in each, whose bytes pass the thin link once
    thin = tensor_s(1000, (0, 1, 2, 3), 1.0) - near
    bits = 64 * 24 * 6 * 2 * 3 / 4 * 8 * 2 * 2048 * MODEL.hidden
    assert thin == pytest.approx(bits / 0.9 * (1 / 1e9 - 1 / 100e9), rel=0.05)


def test_replicas_of_spread_ranks_wait_for_the_farthest_of_them() -> None:
    """Of two ranks of each cell the second ones are far from each other."""
    groups = [nodes_of_one(3, 5.0), nodes_of_one(1, 5.0, name="there")]
    cluster = Cluster.of_groups(groups, [far(0.5, 1000)])
    layout = parse_layout("dp2,tp2,mbs1,fp16")
    first_near, all_near = (
        estimate(case_on(each, "megatron"), layout).time.dp
        for each in (cluster, Cluster.of_groups(groups, [far(5.0, 1000)]))
    )
    assert first_near == pytest.approx(10 * all_near, rel=0.05)


def test_parts_of_a_send_are_gathered_over_the_links_of_those_that_gather_them() -> None:
    """DeepSpeed's engine sends a part from each rank along TP; however long its way, they gather it near each other."""
    groups, layout = [nodes_of_one(4), nodes_of_one(4, name="there")], parse_layout("tp4,pp2,mbs1,fp16,recompute-full")
    longer = {
        stack: [
            estimate(case_on(Cluster.of_groups(groups, [far(5.0, delay_us)]), stack), layout).sec_per_it
            for delay_us in (1000, 50_000)
        ]
        for stack in ("megatron", "megatron-deepspeed")
    }
    whole, parts = (late - early for early, late in longer.values())
    assert parts == pytest.approx(whole, rel=0.05)


def test_a_slow_node_slows_the_stage_that_stands_on_it_and_a_split_makes_up_for_it() -> None:
    fast, slow = nodes_of_one(1), nodes_of_one(1, name="there")
    half = {rate: tflops / 2 for rate, tflops in slow.device.peak_tflops.items()}
    memory = slow.device.mem_bandwidth_gb_s / 2
    device = slow.device.model_copy(update={"peak_tflops": half, "mem_bandwidth_gb_s": memory})
    slow = slow.model_copy(update={"device": device})
    case = case_on(Cluster.of_groups([fast, slow], [far(5.0, 1000)]))
    even = estimate(case, parse_layout("pp2,mbs1,fp16,recompute-full,gpipe"))
    uneven = estimate(case, parse_layout("pp2,mbs1,fp16,recompute-full,gpipe,split16-8"))
    turned = estimate(case, parse_layout("pp2,mbs1,fp16,recompute-full,gpipe,split16-8,on1.0"))
    assert uneven.sec_per_it < 0.8 * even.sec_per_it < even.sec_per_it < turned.sec_per_it


def test_stages_that_share_cores_do_not_all_wait_for_the_one_that_is_held_back() -> None:
    """However little two ranks feel each other, it is known of machines on which they share cores."""
    device = Device(kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=4, mem_bandwidth_gb_s=10, cores=1)
    link = Link(bandwidth_gbps=10, latency_us=10)
    slow = ShapedNode(node=1, cpu_share=0.5)
    network = ShapedNetwork(name="half", latency_ms=1, bandwidth_gbps=1, nodes=(slow,))
    model = Model(layers=12, hidden=256, heads=4, vocab=512, max_positions=128)
    seconds = []
    for felt in (1.0, 1.002):
        contention = (Contention(ranks=2, matmul=felt, memory=felt, overhead=felt),)
        machine = Cluster(device=device, nodes=1, devices_per_node=2, intra=link, inter=link, contention=contention)
        case = Case.of(Workload(model=model, seq_len=128, global_batch=16), machine.on(network), load_stack("trimaran"))
        each = [estimate(case, parse_layout(f"pp2,mbs1,gpipe,{split}")) for split in ("split6-6", "split8-4")]
        seconds.append([one.sec_per_it for one in each])
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)
    assert 1.25 < seconds[1][0] / seconds[1][1] < 1.5


@given(st.permutations(range(8)), st.sampled_from(["dp2,pp4", "dp4,pp2", "dp8", "pp8"]))
@settings(deadline=None, max_examples=20)
def test_a_cluster_is_never_slower_than_it_is_taken_for_as_one(order: list[int], degrees: str) -> None:
    cluster = Cluster.of_groups([nodes_of_one(4), nodes_of_one(4, 2.0, 9000, "there")], [far(0.7, 30_000)])
    case = case_on(cluster)
    layout = parse_layout(f"{degrees},mbs1,fp32").model_copy(update={"placed": tuple(order)})
    grid = LayoutGrid.from_layouts([layout], case.workload, case.stack)
    as_one = estimate_each(case, grid, simulate=True)[0]
    assert estimate(case, layout).sec_per_it <= as_one.sec_per_it * (1 + 1e-9)


def half_speed(group: NodeGroup) -> NodeGroup:
    """The same nodes, whose devices compute and move half as much in a second."""
    half = {rate: tflops / 2 for rate, tflops in group.device.peak_tflops.items()}
    update = {"peak_tflops": half, "mem_bandwidth_gb_s": group.device.mem_bandwidth_gb_s / 2}
    return group.model_copy(update={"device": group.device.model_copy(update=update)})


def fast_and_slow(nodes: int) -> Case:
    """As many nodes at full and at half speed, near each other."""
    slow = half_speed(nodes_of_one(nodes, 100.0, 10.0, name="there"))
    cluster = Cluster.of_groups([nodes_of_one(nodes, 100.0, 10.0), slow], [far(100.0, 10.0)])
    return case_on(cluster, "trimaran", global_batch=24)


def test_a_replica_of_half_speed_that_takes_half_as_many_micro_batches_holds_nobody_up() -> None:
    case = fast_and_slow(1)
    as_many, unlike, other = (
        estimate(case, parse_layout(f"dp2,mbs1,fp32,recompute-full{dealt}"))
        for dealt in ("", ",batches16-8", ",batches8-16")
    )
    busy = [
        sum(getattr(found.time, part) for part in ("forward", "backward", "recompute", "head"))
        for found in (as_many, unlike, other)
    ]
    # 12 at half speed; 8 at half speed and 16 at full speed; 16 at half speed
    assert busy[1] == pytest.approx(busy[0] * 8 / 12, rel=0.01)
    assert busy[2] == pytest.approx(busy[0] * 16 / 12, rel=0.01)
    assert unlike.sec_per_it < 0.75 * as_many.sec_per_it
    for found in (as_many, unlike, other):
        assert sum(found.time.model_dump().values()) == pytest.approx(found.sec_per_it, rel=1e-9)


@pytest.mark.parametrize("text", ["dp2,mbs1", "dp2,pp2,mbs1", "dp2,pp2,mbs1,gpipe", "dp2,pp2,vpp2,mbs1,zero1"])
def test_as_many_micro_batches_for_all_cost_the_same_stated_or_not(text: str) -> None:
    for case in (fast_and_slow(2), case_on(nodes_alike(4), "trimaran", global_batch=24)):
        plain, stated = (
            estimate(case, parse_layout(f"{text},fp32,recompute-full{dealt}")) for dealt in ("", ",batches12-12")
        )
        assert stated == plain


def nodes_alike(nodes: int) -> Cluster:
    return Cluster.of_groups([nodes_of_one(nodes)], ()).model_copy(update={"groups": ()})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", "interleaved,vpp2"])
@pytest.mark.parametrize("batches", [(16, 8), (20, 4), (8, 16)])
def test_each_replica_is_played_with_its_own_micro_batches(schedule: str, batches: tuple[int, int]) -> None:
    case, text = fast_and_slow(2), f"dp2,pp2,mbs1,{schedule},fp32,recompute-full"
    nodes = np.array([[0, 1], [2, 3]])
    dealt = "-".join(map(str, batches))
    done, _ = PlacedCost(case, parse_layout(f"{text},batches{dealt}")).of_cells(nodes)
    for replica, taken in enumerate(batches):
        workload = case.workload.model_copy(update={"global_batch": 2 * taken})
        alone, _ = PlacedCost(case.with_workload(workload), parse_layout(text)).of_cells(nodes)
        assert done[replica] == pytest.approx(alone[replica], rel=1e-9)


def test_on_alike_nodes_the_replica_that_takes_most_is_waited_for_and_its_memory_counts() -> None:
    case = case_on(nodes_alike(4), "trimaran", global_batch=24)
    text = "dp2,pp2,mbs1,gpipe,fp32"
    unlike, least = (estimate(case, parse_layout(f"{text}{dealt}")) for dealt in (",batches20-4", ""))
    all_as_many = estimate(
        case.with_workload(case.workload.model_copy(update={"global_batch": 40})), parse_layout(text)
    )
    assert unlike.micro_batches == 20
    assert unlike.sec_per_it == pytest.approx(all_as_many.sec_per_it)
    assert unlike.memory == all_as_many.memory
    assert unlike.mem_gib > least.mem_gib


@pytest.mark.parametrize(("cores", "of_eight"), [(2, 4.2), (4, 4.2), (8, 2.1), (64, 2.1)])
def test_more_ranks_than_were_probed_take_turns_where_cores_are_too_few(cores: int, of_eight: float) -> None:
    device = Device(kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=4, mem_bandwidth_gb_s=10, cores=1)
    link = Link(bandwidth_gbps=10, latency_us=10)
    known = tuple(Contention(ranks=n, matmul=slow, memory=slow, overhead=slow) for n, slow in ((2, 1.1), (4, 2.1)))
    machine = Cluster(
        device=device, nodes=1, devices_per_node=8, intra=link, inter=link, contention=known, cores_per_node=cores
    )
    of_two, of_four, found = slowdowns(machine, np.array([2, 4, 8])).matmul
    assert (of_two, of_four) == pytest.approx((1.1, 2.1))
    assert found == pytest.approx(of_eight)
