"""Where ranks stand on machines that differ, and what is true of the devices under them."""

from __future__ import annotations

import pytest

from trimaran.files.catalogue import load_device, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.layout.places import mean_of_devices, peak_tflops
from trimaran.layout.rules import violations
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.hardware.node_group import GroupLink, NodeGroup
from trimaran.nouns.workload import Workload
from trimaran.planner.planner import plan

LINK = Link(bandwidth_gbps=100, latency_us=5)
NEW, OLD = load_device("a100-sxm-80gb"), load_device("v100-sxm2-32gb")


def two_generations() -> Cluster:
    """Four A100 at 2 a device-hour, and four V100 at 0.5, which do not compute in bf16."""
    groups = [
        NodeGroup(name=name, device=device, nodes=1, devices_per_node=4, intra=LINK, inter=LINK,
                  price_per_device_hour=price)
        for name, device, price in (("new", NEW, 2.0), ("old", OLD, 0.5))
    ]  # fmt: skip
    return Cluster.of_groups(groups, [GroupLink(between=("new", "old"), bandwidth_gbps=1, latency_us=1000)])


@pytest.mark.parametrize(
    ("text", "peak", "price"),
    [
        ("dp4,mbs1,bf16,on0-3", 312.0, 2.0),
        ("dp4,mbs1,fp16,on4-7", 125.0, 0.5),
        ("dp4,mbs1,fp16,on2-5", (312.0 + 125.0) / 2, 1.25),
        ("dp8,mbs1,bf16,on0-7", None, 1.25),
    ],
)
def test_peaks_and_prices_are_of_the_devices_that_ranks_stand_on(text: str, peak: float | None, price: float) -> None:
    layout, cluster = parse_layout(text), two_generations()
    assert peak_tflops(layout, cluster) == peak
    assert mean_of_devices(layout, cluster, lambda nodes: nodes.price_per_device_hour) == price


def test_a_precision_is_refused_only_where_a_rank_stands_that_lacks_it() -> None:
    workload = Workload(model=load_model("gpt2-124m"), seq_len=1024, global_batch=64)

    def sentences(text: str) -> list[str]:
        broken = violations(parse_layout(text), workload, two_generations(), load_stack("trimaran"))
        return [violation.sentence for violation in broken if violation.rule == "precision"]

    assert not sentences("dp4,mbs1,bf16,on0-3")
    (sentence,) = sentences("dp8,mbs1,bf16,on0-7")
    assert "bf16" in sentence and OLD.name in sentence


@pytest.mark.proof
def test_a_plan_on_a_part_of_the_machines_costs_what_that_part_costs() -> None:
    workload = Workload(model=load_model("gpt2-124m"), seq_len=1024, global_batch=64, tokens=10**10)
    best = plan(workload, two_generations(), load_stack("trimaran"), top=1).best
    assert best.layout.placed == (0, 1, 2, 3)
    assert best.mfu == pytest.approx(best.tflops / 312.0)
    assert best.days is not None
    assert best.cost == pytest.approx(best.days * 24.0 * 4 * 2.0)
