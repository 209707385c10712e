"""Placement: what its search finds, held against random ones, small spaces tried whole, and its own bound."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from command import run
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.hardware.node_group import GroupLink, NodeGroup
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import Workload
from trimaran.planner.placement.place import Placing, place
from trimaran.planner.planner import plan, plan_with
from trimaran.planner.search.settings import settings_from
from trimaran.planner.why import explain

GPT = parse_layout("dp8,pp8,mbs1,fp16,recompute-full,gpipe")
NAMES = ("a", "b", "c")
GPT3_XL = load_model("gpt3-xl")
# the same, whose first and last stage sum the gradient of one embedding
TIED = GPT3_XL.model_copy(update={"tied_embedding": True, "head": "vocabulary"})


def case_on(cluster: Cluster, global_batch: int = 1024, model: Model = GPT3_XL) -> Case:
    workload = Workload(model=model, global_batch=global_batch, seq_len=2048)
    return Case.of(workload, cluster, load_stack("gpipe"))


def of_groups(sizes: list[int], per_node: list[int], rates: list[float]) -> Cluster:
    """Three groups with such links to each other."""
    device = load_cluster("aws-p3-2xlarge").device
    intra, inter = Link(bandwidth_gbps=100, latency_us=5), Link(bandwidth_gbps=5, latency_us=500)
    groups = [
        NodeGroup(name=name, device=device, nodes=nodes, devices_per_node=each, intra=intra, inter=inter)
        for name, nodes, each in zip(NAMES, sizes, per_node, strict=True)
    ]
    pairs = (("a", "b"), ("a", "c"), ("b", "c"))
    links = [
        GroupLink(between=pair, bandwidth_gbps=rate, latency_us=20_000 / rate)
        for pair, rate in zip(pairs, rates, strict=True)
    ]
    return Cluster.of_groups(groups, links, name="three")


@pytest.mark.parametrize(
    ("name", "times_faster"), [("dtfm-two-universities", 1.3), ("dtfm-four-regions", 1.3), ("dtfm-world", 1.3)]
)
def test_placements_of_the_study_are_faster_than_random_ones_and_named_by_an_estimate(
    name: str, times_faster: float
) -> None:
    found = place(case_on(load_cluster(name)), GPT)
    assert found.random_s > times_faster * found.seconds
    assert found.least_s <= found.seconds
    assert sorted(found.layout.placed) == list(range(64))
    assert estimate(case_on(load_cluster(name)), found.layout).sec_per_it == pytest.approx(found.seconds)


@given(
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.lists(st.sampled_from([1, 2]), min_size=3, max_size=3),
    st.lists(st.sampled_from([0.3, 1.0, 4.0]), min_size=3, max_size=3),
    st.sampled_from(
        [
            "pp3",
            "dp2",
            "dp3",
            "dp2,pp2",
            "pp4",
            "dp4",
            "dp8",
            "dp4,shard2,zero1",
            "dp4,shard2,zero3",
            "dp6,shard3,zero2",
            "dp4,pp2,shard2,zero1",
            "dp8,shard4,zero2",
        ]
    ),
    st.integers(0, 2**32 - 1),
    st.sampled_from([GPT3_XL, TIED]),
)
# rings of eight nodes, whose delay a tree passes less often than those of two
@example(sizes=[3, 3, 2], per_node=[1, 1, 1], rates=[0.3, 4.0, 4.0], degrees="dp8", seed=0, model=GPT3_XL)
@example(sizes=[3, 3, 2], per_node=[1, 1, 1], rates=[0.3, 4.0, 0.3], degrees="dp8,shard2,zero1", seed=1, model=GPT3_XL)
@pytest.mark.proof
# one node has room for both replicas, behind the thinnest links: no line of groups begins there
@example(sizes=[1, 1, 1], per_node=[1, 1, 2], rates=[1.0, 0.3, 0.3], degrees="dp2", seed=0, model=GPT3_XL)
@settings(deadline=None, max_examples=25)
def test_no_placement_is_below_the_bound_and_few_cells_are_placed_as_well_as_by_trying_all(
    sizes: list[int], per_node: list[int], rates: list[float], degrees: str, seed: int, model: Model
) -> None:
    layout = parse_layout(f"{degrees},mbs1,fp16,recompute-full")
    cluster = of_groups(sizes, per_node, rates)
    if cluster.devices < layout.devices:
        return
    placing = Placing(case_on(cluster, 48, model), layout)
    placing.improve()
    random = np.random.default_rng(seed)
    for _ in range(10):
        seconds = placing.cost.seconds(placing.blocks.nodes(layout, random.permutation(len(placing.blocks))))
        assert placing.least_s <= seconds * (1 + 1e-9)
    if len(placing.blocks) <= 6:
        orders = (np.array(order) for order in permutations(range(len(placing.blocks))))
        best = min(placing.cost.seconds(placing.blocks.nodes(layout, order)) for order in orders)
        assert placing.seconds <= best * 1.02


def test_ranks_of_a_tensor_parallel_group_stand_on_one_node_or_have_no_place() -> None:
    cluster = of_groups([2, 1, 1], [2, 4, 1], [1.0, 1.0, 1.0])
    case = Case.of(Workload(model=GPT3_XL, global_batch=8, seq_len=2048), cluster, load_stack("trimaran"))
    found = place(case, parse_layout("dp4,tp2,mbs1,fp32"))
    node = [0, 0, 1, 1, 2, 2, 2, 2, 3]
    pairs = [{node[device] for device in found.layout.placed[rank : rank + 2]} for rank in range(0, 8, 2)]
    assert all(len(pair) == 1 for pair in pairs)
    # two whole nodes of two devices, and the node of four
    with pytest.raises(TrimaranError, match=r"room for 2 groups of TP 4 x CP 1 ranks .*DP 3 x PP 1 = 3 are needed"):
        place(case, parse_layout("dp3,tp4,mbs1,fp32"))


def test_stages_on_slow_nodes_have_fewer_layers_where_the_split_is_left_open() -> None:
    cluster = of_groups([2, 1, 1], [1, 1, 1], [5.0, 5.0, 5.0])
    slow = cluster.groups[1].device
    half = {rate: tflops / 2 for rate, tflops in slow.peak_tflops.items()}
    device = slow.model_copy(update={"peak_tflops": half, "mem_bandwidth_gb_s": slow.mem_bandwidth_gb_s / 2})
    groups = [cluster.groups[0], cluster.groups[1].model_copy(update={"device": device}), cluster.groups[2]]
    case = case_on(Cluster.of_groups(groups, cluster.links), 64)
    layout = parse_layout("pp4,mbs1,fp16,recompute-full,gpipe")
    placing = Placing(case, layout)
    even = placing.seconds
    placing.improve()
    found = placing.best
    on_slow = found.placed.index(2)
    assert found.stage_split[on_slow] == min(found.stage_split) < 24 // 4 < max(found.stage_split)
    assert sum(found.stage_split) == 24
    assert placing.seconds < 0.75 * even
    assert placing.least_s <= placing.seconds


def test_a_stage_that_fits_on_large_devices_alone_is_put_there_and_a_refusal_names_the_group() -> None:
    cluster = of_groups([1, 1, 1], [1, 1, 1], [5.0, 5.0, 5.0])
    workload = Workload(model=GPT3_XL, global_batch=4, seq_len=2048)
    held = {"pp": 3, "dp": 1, "tp": 1, "mbs": 1, "precision": "fp16"}

    def with_memory(*gib: float) -> Cluster:
        sized = zip(cluster.groups, gib, strict=True)
        groups = [
            group.model_copy(update={"device": group.device.model_copy(update={"mem_gib": each})})
            for group, each in sized
        ]
        return Cluster.of_groups(groups, cluster.links, name="unlike")

    stack = load_stack("megatron-core")
    roomy = plan(workload, with_memory(900, 900, 900), stack, top=1, fixed=held).best
    first, second, _ = sorted((stage.total for stage in roomy.estimate.memory), reverse=True)
    fullest = max(roomy.estimate.memory, key=lambda stage: stage.total).stage
    held |= {"recompute": roomy.layout.recompute, "vpp": roomy.layout.vpp}
    between = (first + second) / 2
    found = plan(workload, with_memory(between, first * 1.1, between), stack, top=3, mem_margin=0.0, fixed=held).best
    assert found.estimate.fits
    assert found.layout.placed[fullest] == 1
    case = Case.of(workload, with_memory(between, first * 1.1, between), stack)
    elsewhere = found.layout.model_copy(
        update={"placed": tuple({1: 0, 0: 1}.get(at, at) for at in found.layout.placed)}
    )
    assert not estimate(case, elsewhere).fits
    told = explain(str(elsewhere), case, settings_from(fixed=held, mem_margin=0.0))
    assert told.verdict == "does not fit"
    assert f"stage {fullest} needs" in told.reasons[0] and "GiB on" in told.reasons[0]
    with pytest.raises(
        TrimaranError, match=r"fits; the nearest is .* a rank may use .*of all groups b has the most"
    ) as no:
        plan(workload, with_memory(1.0, 2.0, 1.0), stack, mem_margin=0.0, fixed=held)
    assert "\n" not in str(no.value)
    # two stages need the large device, of which there is one
    tight = (second + min(stage.total for stage in roomy.estimate.memory)) / 2
    with pytest.raises(TrimaranError, match=r"no layout fits on unlike; the nearest is .*GiB on [ac] \(margin"):
        plan(workload, with_memory(tight, first * 1.1, tight), stack, mem_margin=0.0, fixed=held)


@pytest.mark.proof
def test_two_regions_over_a_thin_link_are_not_left_idle_without_a_word() -> None:
    a100 = load_cluster("aws-p4d-24xlarge")
    groups = [
        NodeGroup(name=name, device=a100.device, nodes=4, devices_per_node=8, intra=a100.intra, inter=a100.inter)
        for name in ("east", "west")
    ]
    link = GroupLink(between=("east", "west"), bandwidth_gbps=1.0, latency_us=60_000)
    cluster = Cluster.of_groups(groups, [link], name="two")
    workload = Workload(model=GPT3_XL, global_batch=512, seq_len=2048)
    held = {"mbs": 1, "recompute": "none", "vpp": 1}
    found = plan(workload, cluster, load_stack("megatron-core"), top=5, fixed=held)
    alone = cluster.model_copy(
        update={"groups": (), "links": (), "nodes": 4, "devices_per_node": 8, "inter": a100.inter}
    )
    region = plan(workload, alone, load_stack("megatron-core"), top=1, fixed=held)
    # never slower than what one region does alone, and what stays idle is said
    assert found.best.sec_per_it <= region.best.sec_per_it * 1.001
    assert found.best.devices == 64 or any("idle are" in note for note in found.notes)
    assert any("no placement of the layouts weighed takes less than" in note for note in found.notes)


def two_sites(gbps: float, prices: tuple[float, float] | tuple[None, None] = (None, None)) -> Cluster:
    """Two sites of two nodes of four V100 with so thin a way from each node to each one of the other site."""
    node = load_cluster("aws-p3-16xlarge")
    groups = [
        NodeGroup(
            name=name, device=node.device, nodes=2, devices_per_node=4, intra=node.intra,
            inter=Link(bandwidth_gbps=100, latency_us=20), price_per_device_hour=price,
        )
        for name, price in zip(("dear", "cheap"), prices, strict=True)
    ]  # fmt: skip
    return Cluster.of_groups(groups, [GroupLink(between=("dear", "cheap"), bandwidth_gbps=gbps, latency_us=5000)])


# what each data-parallel layout costs is left open, and little else, so that the search is short
HELD = {"mbs": 1, "recompute": "full", "vpp": 1, "precision": "fp16", "tp": 1, "pp": 1}
GPT_OF_64 = Workload(model=TIED, global_batch=64, seq_len=2048)


@pytest.mark.proof
def test_states_are_shared_out_inside_of_sites_where_the_way_between_them_is_thin() -> None:
    stack, cluster = load_stack("trimaran"), two_sites(25.0)
    found = plan(GPT_OF_64, cluster, stack, top=1, fixed=HELD)
    of_all = plan(GPT_OF_64, cluster, stack, top=1, fixed={**HELD, "shard": 8}, device_counts=(16,))
    assert found.best.sec_per_it <= of_all.best.sec_per_it * 1.001


@pytest.mark.proof
def test_the_cheapest_layout_stands_on_cheap_devices_and_a_budget_counts_where_it_stands() -> None:
    stack, cluster = load_stack("trimaran"), two_sites(1.0, (4.0, 1.0))
    cheapest = plan(GPT_OF_64, cluster, stack, top=1, fixed=HELD, goal="cost").best
    assert min(cheapest.layout.placed) >= 8
    trained = GPT_OF_64.model_copy(update={"tokens": 1e9})
    open_to_all = plan(trained, cluster, stack, top=1, fixed=HELD).best
    assert open_to_all.cost is not None
    within = plan(trained, cluster, stack, top=1, fixed=HELD, budget=open_to_all.cost / 2).best
    assert within.cost is not None
    assert within.cost <= open_to_all.cost / 2
    with pytest.raises(TrimaranError, match=r"meets the budget of .*: the cheapest, dp.*, costs .* and takes"):
        plan(trained, cluster, stack, top=1, fixed=HELD, budget=open_to_all.cost / 1000)


def test_the_place_of_a_layout_that_is_asked_about_goes_by_the_objective() -> None:
    case = Case.of(GPT_OF_64, two_sites(1.0, (4.0, 1.0)), load_stack("trimaran"))
    settings = settings_from(top=2, fixed={**HELD, "dp": 4, "cp": 1, "zero_stage": 1}, goal="cost")
    cheapest = plan_with(case, settings).best.layout
    told = explain(str(cheapest), case, settings)
    assert (told.verdict, told.rank) == ("ranked", 1)
    # on the devices in their order, which cost four times as much
    told = explain(str(cheapest.model_copy(update={"placed": ()})), case, settings)
    assert (told.verdict, told.rank) == ("slower", None)


@pytest.mark.proof
def test_the_fewest_devices_that_meet_a_deadline_are_named_on_groups_too() -> None:
    stack, cluster = load_stack("trimaran"), two_sites(25.0)
    trained = GPT_OF_64.model_copy(update={"tokens": 1e9})
    fastest = plan(trained, cluster, stack, top=1, fixed=HELD).best
    assert fastest.days is not None
    ask = {"goal": "devices", "deadline_days": 4 * fastest.days, "fixed": HELD}
    fewest = plan(trained, cluster, stack, top=1, **ask).best
    assert fewest.devices < fastest.devices
    assert fewest.days is not None
    assert fewest.days <= 4 * fastest.days


def test_a_layout_is_placed_with_the_global_batch_that_it_was_found_for() -> None:
    workload = GPT_OF_64.model_copy(update={"global_batch": 62})
    held = {**HELD, "dp": 16}
    best = plan(workload, two_sites(25.0), load_stack("trimaran"), top=1, fixed=held, gbs_tolerance=0.1).best
    assert best.global_batch == 64


def test_devices_that_stay_idle_are_told_of_where_all_nodes_are_alike() -> None:
    cluster = two_sites(1.0).model_copy(
        update={"groups": (), "links": (), "inter": Link(bandwidth_gbps=0.1, latency_us=60_000)}
    )
    found = plan(GPT_OF_64, cluster, load_stack("trimaran"), top=1, fixed=HELD)
    idle = cluster.devices - found.best.devices
    assert idle > 0
    assert any(f"{idle} are idle; all of them would take" in note for note in found.notes)


def test_what_all_devices_would_take_is_what_a_plan_on_all_of_them_says() -> None:
    """The closed form said less than the plan's simulation, even less than the best itself."""
    cluster = load_cluster("dgx-h100")
    found = plan(GPT_OF_64, cluster, load_stack("trimaran"), top=1, devices=56)
    assert found.best.devices < 56
    of_all = plan(GPT_OF_64, cluster, load_stack("trimaran"), top=1, devices=56, device_counts=(56,))
    assert any(f"all of them would take {of_all.best.sec_per_it:.4g} s" in note for note in found.notes)


def test_the_command_line_plans_on_the_study_s_clusters() -> None:
    told = run(
        "plan", "--model", "gpt3-xl", "--cluster", "dtfm-two-universities", "--stack", "gpipe", "--gbs", "1024",
        "--seq-len", "2048", "--fix", "precision=fp16", "--fix", "pp=8", "--fix", "dp=8",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert "stand where a search put them" in told.stdout
    more = run("plan", "--model", "gpt3-xl", "--cluster", "dtfm-world", "--gbs", "64", "--devices", "128")
    assert more.returncode == 2
    assert "devices 128, but the groups of dtfm-world have 64" in more.stderr


@pytest.mark.proof
def test_a_layout_that_is_asked_about_is_predicted_where_its_ranks_stand() -> None:
    case = case_on(load_cluster("dtfm-four-regions"))
    in_order = GPT.model_copy(update={"placed": tuple(range(64))})
    asked = explain(f"{in_order}", case, settings_from(fixed={"dp": 8, "pp": 8, "mbs": 1, "precision": "fp16"}, top=3))
    assert asked.estimate is not None
    assert asked.best_estimate is not None
    assert asked.estimate.sec_per_it == pytest.approx(estimate(case, in_order).sec_per_it)
    assert asked.best_estimate.sec_per_it < asked.estimate.sec_per_it


def test_a_plan_is_the_same_in_whichever_order_a_file_has_its_groups() -> None:
    """The head stands on the last stage, so which of two unlike nodes comes last is for a placement to choose."""
    fast = load_cluster("aws-p3-16xlarge").device
    peaks = {rate: tflops / 2 for rate, tflops in fast.peak_tflops.items()}
    slow = fast.model_copy(update={"name": "slow", "peak_tflops": peaks})
    intra, inter = Link(bandwidth_gbps=600, latency_us=5), Link(bandwidth_gbps=25, latency_us=20)
    workload = Workload(model=load_model("gpt2-355m"), seq_len=1024, global_batch=64)
    seconds = []
    for order in ((("a", fast), ("b", slow)), (("b", slow), ("a", fast))):
        groups = [
            NodeGroup(name=name, device=device, nodes=1, devices_per_node=4, intra=intra, inter=inter)
            for name, device in order
        ]
        link = GroupLink(between=("a", "b"), bandwidth_gbps=25, latency_us=20)
        cluster, stack = Cluster.of_groups(groups, [link], name="two"), load_stack("megatron")
        seconds.append(plan(workload, cluster, stack, top=1).best.sec_per_it)
    assert seconds[0] == pytest.approx(seconds[1])


def test_a_placed_stage_of_dense_layers_sums_as_much_however_many_experts_another_has() -> None:
    """Experts of the fullest stage were taken from what each stage holds."""

    def seconds_of(experts: int) -> float:
        model = Model(
            layers=8, hidden=1024, heads=16, vocab=1000, experts=experts, top_k=2, moe_ffn_hidden=4096,
            ffn_hidden=2048, dense_layers=4,
        )  # fmt: skip
        workload = Workload(model=model, global_batch=64, seq_len=1024)
        case = Case.of(workload, load_cluster("dtfm-spot"), load_stack("megatron-core"))
        return estimate(case, parse_layout("dp4,pp2,ep4,mbs1,bf16")).time.dp

    assert seconds_of(64) == pytest.approx(seconds_of(8))
