"""Claims about the map of a placed layout: every rank in its box, what crosses counted, legible in narrow windows."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser

from trimaran.api import plan
from trimaran.files.catalogue import load_cluster
from trimaran.layout.axes import groups
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.shaped_network import ShapedNetwork, ShapedNode, ShapedPair
from trimaran.report.page.html import page
from trimaran.report.page.planned import plan_content
from trimaran.report.placement_map import PlacementMap, placement_map
from trimaran.report.planned import as_json
from watched_page import watching

REGIONS = load_cluster("dtfm-four-regions")


@given(st.permutations(range(64)), st.sampled_from([(8, 1, 8), (4, 2, 8), (2, 4, 2), (1, 1, 5)]))
@settings(max_examples=30, deadline=None)
def test_neighbours_in_two_regions_are_counted_and_every_rank_is_in_its_own(
    devices: list[int], degrees: tuple[int, int, int]
) -> None:
    dp, tp, pp = degrees
    layout = Layout(dp=dp, tp=tp, pp=pp, placed=tuple(devices[: dp * tp * pp]))
    drawn = PlacementMap.of(REGIONS, layout)
    region = [device // 16 for device in layout.placed]
    assert list(drawn.box_of) == region
    apart = [
        (min(region[a], region[b]), max(region[a], region[b]))
        for stages in groups(layout, "pp")
        for a, b in pairwise(stages)
        if region[a] != region[b]
    ]
    assert {way: crossing.sends for way, crossing in drawn.crossings.items() if crossing.sends} == {
        way: apart.count(way) for way in apart
    }
    shown = placement_map(REGIONS, layout)
    cells = [int(rank) for ranks in re.findall(r"<small>([\d, ]+)</small>", shown) for rank in ranks.split(",")]
    if tp == 1:
        assert sorted(cells) == list(range(layout.devices))


def test_a_ring_of_two_replicas_crosses_once_and_one_of_four_comes_back() -> None:
    def hops(layout: str) -> dict[tuple[int, int], dict[str, int]]:
        return {
            way: dict(crossing.rings)
            for way, crossing in PlacementMap.of(REGIONS, parse_layout(layout)).crossings.items()
        }

    assert hops("dp2,mbs1,on0.16") == {(0, 1): {"DP": 1}}
    assert hops("dp4,mbs1,on0.1.16.32") == {(0, 1): {"DP": 1}, (1, 2): {"DP": 1}, (0, 2): {"DP": 1}}


def test_alike_devices_in_their_order_have_no_map() -> None:
    assert placement_map(load_cluster("a100-8x-node"), parse_layout("dp8,mbs1")) == ""
    assert "node 1" in placement_map(load_cluster("aws-p3-16xlarge"), parse_layout("dp2,mbs1,on0.8"))


@pytest.mark.parametrize("layout", ["dp2,mbs1,on0.64", "dp65,mbs1"])
def test_a_plan_of_a_cluster_that_has_become_smaller_since_has_no_map(layout: str) -> None:
    assert REGIONS.devices == 64
    assert placement_map(REGIONS, parse_layout(layout)) == ""


def test_a_shaped_network_shows_its_slow_node_and_the_way_of_each_two() -> None:
    laptop = load_cluster("fugaku-a64fx").model_copy(update={"nodes": 1, "devices_per_node": 4})
    network = ShapedNetwork(
        name="unlike", latency_ms=4, bandwidth_gbps=1, nodes=(ShapedNode(node=2, cpu_share=0.5),),
        pairs=(ShapedPair(nodes=(0, 2), latency_ms=30, bandwidth_gbps=0.1),),
    )  # fmt: skip
    shown = placement_map(laptop.on(network), parse_layout("pp3,mbs1,on0.2.3"))
    assert "<h3>node 2</h3><p>at 50% of the others' speed</p>" in shown.replace("&#x27;", "'")
    assert "<b>node 0 and node 2</b> (0.1 Gbit/s, 30 ms): 1 pair of neighbouring stages" in shown
    assert "<b>node 2 and node 3</b> (1 Gbit/s, 4 ms)" in shown
    assert "No rank stands in node 1." in shown


@pytest.fixture(scope="module")
def placed_plan() -> dict[str, Any]:
    planned = as_json(plan("gpt2-124m", "a100-8x-node", 64, devices=8, top=1))
    layouts = [{**planned["layouts"][0], "layout": "dp8,pp8,mbs1,on" + ".".join(str(i * 5 % 64) for i in range(64))}]
    return {**planned, "cluster": REGIONS.name, "layouts": layouts}


def test_the_first_sentence_names_the_layout_without_the_device_of_every_rank(placed_plan: dict[str, Any]) -> None:
    content = plan_content(placed_plan)
    assert content.answers[0].fastest.startswith("dp8,pp8,mbs1, predicted ")
    assert ",on0.5.10" in content.cases[0].layout


@pytest.mark.proof
@pytest.mark.parametrize("width", [400, 1400])
def test_the_map_is_on_the_plans_page_and_legible(
    browser: Browser, placed_plan: dict[str, Any], tmp_path: Path, width: int
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(plan_content(placed_plan)))
    with watching(browser) as watched:
        opened = watched.open(file)
        opened.set_viewport_size({"width": width, "height": 900})
        assert opened.locator("#map h3").all_inner_texts() == [group.name for group in REGIONS.groups]
        assert opened.locator("#map .places li").count() == 64
        sizes = opened.locator("#map small, #map li, #map p").evaluate_all(
            "all => all.map(one => parseFloat(getComputedStyle(one).fontSize))"
        )
        assert min(sizes) >= 11
        drawn = opened.locator("#map svg").bounding_box()
        assert drawn is not None
        assert drawn["width"] >= 300, "letters of a drawing shrink with it"
        # charts follow a window that was made narrower a while later
        opened.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)
