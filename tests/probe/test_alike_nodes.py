"""The tournament of pairs, and the groups that are made of what it measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.files.catalogue import dump_toml, load_cluster
from trimaran.nouns.cluster import Cluster
from trimaran.probe.alike_nodes import BANDWIDTH_ALIKE, DELAY_ALIKE, SAME_DELAY_US, alike_groups, distances, filled
from trimaran.probe.links import LinkProbe
from trimaran.probe.links_result import AtOnce, LinksResult, NodeFacts
from trimaran.probe.tournament import rounds_of_pairs


@given(st.integers(0, 70))
def test_each_two_meet_once_in_rounds_in_which_nobody_plays_twice(players: int) -> None:
    rounds = list(rounds_of_pairs(players))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(players), 2))
    assert len(rounds) == (0 if players < 2 else players - 1 + players % 2)
    for pairs in rounds:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs) == players - players % 2


@st.composite
def regions(draw: st.DrawFn) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The region of each node, and matrices of ways that are near inside of regions and far between them."""
    of_node = draw(st.lists(st.integers(0, 3), min_size=2, max_size=14))
    latency = {}
    bandwidth = {}
    for a, b in combinations(range(4), 2):
        latency[a, b] = latency[b, a] = draw(st.sampled_from([8_000.0, 20_000.0, 60_000.0]))
        for way in ((a, b), (b, a)):
            bandwidth[way] = draw(st.sampled_from([0.1, 0.5]))
    count = len(of_node)
    noise = draw(st.lists(st.floats(0.85, 1.15), min_size=2 * count**2, max_size=2 * count**2))
    delays, rates = np.zeros((count, count)), np.zeros((count, count))
    for u, v in permutations(range(count), 2):
        way = (of_node[u], of_node[v])
        delays[u, v] = latency.get(way, 300.0) * noise[u * count + v]
        rates[u, v] = bandwidth.get(way, 10.0) * noise[count**2 + u * count + v]
    return of_node, delays, rates


def together(of_node: list[int], groups: tuple[tuple[int, ...], ...]) -> bool:
    """Whether no region was torn, and no two regions were joined whose links tell them apart."""
    return all(len({of_node[node] for node in group}) == 1 for group in groups) and len(groups) == len(set(of_node))


@settings(max_examples=80, deadline=None)
@given(regions())
def test_regions_of_several_nodes_become_groups(drawn: tuple[list[int], np.ndarray, np.ndarray]) -> None:
    of_node, delays, rates = drawn
    groups = alike_groups(delays, rates, [1.0] * len(of_node), ["cpu"] * len(of_node))
    assert sorted(node for group in groups for node in group) == list(range(len(of_node)))
    if min(of_node.count(region) for region in of_node) >= 2:
        assert together(of_node, groups)
    for first, second in combinations(range(len(groups)), 2):
        # one link says of each way between two groups what was measured of it, within the tolerance twice
        for matrix, alike, least in ((delays, DELAY_ALIKE, SAME_DELAY_US), (rates, BANDWIDTH_ALIKE, 0.0)):
            ways = np.maximum(matrix[np.ix_(groups[first], groups[second])], least)
            assert ways.max() <= ways.min() * alike**2 * 1.001


@settings(max_examples=60, deadline=None)
@given(regions(), st.randoms(use_true_random=False))
def test_groups_do_not_depend_on_the_order_of_nodes(
    drawn: tuple[list[int], np.ndarray, np.ndarray], random: object
) -> None:
    of_node, delays, rates = drawn
    if min(of_node.count(region) for region in of_node) < 2:
        return
    order = list(range(len(of_node)))
    random.shuffle(order)  # type: ignore[attr-defined]
    places = np.ix_(order, order)
    groups = alike_groups(delays[places], rates[places], [1.0] * len(order), ["cpu"] * len(order))
    assert together([of_node[node] for node in order], groups)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(2, 8), st.integers(1, 15))
def test_what_time_did_not_allow_is_taken_as_of_nodes_nearby(east: int, west: int, allowed: int) -> None:
    of_node = [0] * east + [1] * west
    count = len(of_node)
    full = np.array([[300.0 if a == b else 30_000.0 for b in of_node] for a in of_node])
    rates = np.array([[10.0 if a == b else 0.5 for b in of_node] for a in of_node])
    measured = np.zeros((count, count))
    rounds = list(rounds_of_pairs(count))
    for pairs in rounds[: max(allowed, len(rounds) // 2 + 1)]:
        for u, v in pairs:
            measured[u, v] = measured[v, u] = 1
    latency, bandwidth = filled(full * measured, rates * measured)
    off_diagonal = ~np.eye(count, dtype=bool)
    assert (bandwidth[off_diagonal] > 0).all(), "every way has a value"
    kept = measured > 0
    assert (latency[kept] == full[kept]).all() and (bandwidth[kept] == rates[kept]).all(), "what was measured stands"


class _Slow(LinkProbe):
    """A probe of nodes whose every round takes longer than all of them may."""

    def _play(self, pairs: Sequence[tuple[int, int]], latency: np.ndarray, bandwidth: np.ndarray) -> None:
        for u, v in pairs:
            latency[u, v] = latency[v, u] = 50_000.0
            bandwidth[u, v] = bandwidth[v, u] = 0.01

    def _agreed(self, seconds: float) -> float:
        return 1e6

    def _summed(self, own: np.ndarray) -> np.ndarray:
        return own


@pytest.mark.parametrize("count", [*range(2, 8), 12])
def test_what_slow_links_leave_time_for_says_something_of_every_node(count: int) -> None:
    """After a single round a probe of unlike nodes ended in an error once all was measured."""
    latency, bandwidth, rounds = _Slow(0, 1, count, torch.device("cpu"), limit_s=1.0)._tournament()
    assert rounds == min(2, count - 1 + count % 2)
    assert (filled(latency, bandwidth)[1][~np.eye(count, dtype=bool)] > 0).all()
    nodes = [
        NodeFacts(host=f"n{node}", device=f"kind {node}", slots=8, mem_gib=80, gflops=100) for node in range(count)
    ]
    measured = LinksResult(
        nodes=tuple(nodes), ranks_per_node=1, rounds=rounds, latency_us=latency.tolist(),
        bandwidth_gbps=bandwidth.tolist(), ring_gbps=(0.0,) * count,
    )  # fmt: skip
    assert len(measured.joined(NODE).groups) == count


def test_nodes_of_unlike_devices_or_speeds_are_apart_though_their_links_are_alike() -> None:
    delays, rates = np.full((4, 4), 200.0), np.full((4, 4), 10.0)
    assert alike_groups(delays, rates, [50, 52, 49, 51], ["a"] * 4) == ((0, 1, 2, 3),)
    assert alike_groups(delays, rates, [50, 52, 24, 25], ["a"] * 4) == ((0, 1), (2, 3))
    assert alike_groups(delays, rates, [50] * 4, ["a", "b", "a", "b"]) == ((0, 2), (1, 3))
    assert distances(delays, rates, [50] * 4, ["a"] * 4).max() == 0


NODE = load_cluster("dgx-h100").model_copy(update={"nodes": 1, "name": "mine"})


def result(delays: np.ndarray, rates: np.ndarray, speeds: list[float] | None = None, **others: object) -> LinksResult:
    count = len(delays)
    return LinksResult.model_validate(
        {
            "nodes": [
                NodeFacts(host=f"{'east' if n < count // 2 else 'west'}-{n}.site", device="H100", slots=8, mem_gib=80,
                          gflops=(speeds or [100.0] * count)[n])
                for n in range(count)
            ],
            "ranks_per_node": 8, "rounds": count - 1, "ring_gbps": (0.0,) * count,
            "latency_us": delays.tolist(), "bandwidth_gbps": rates.tolist(), **others,
        }
    )  # fmt: skip


def two_sites(back: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    far = np.array([[a // 2 != b // 2 for b in range(4)] for a in range(4)])
    rates = np.where(far, 0.5, 10.0)
    rates[2:, :2] = back
    return np.where(far, 30_000.0, 300.0), rates


def read_again(cluster: Cluster, tmp_path: object) -> Cluster:
    path = f"{tmp_path}/mine.toml"
    dump_toml(cluster, path)
    loaded = load_cluster(path)
    assert loaded == cluster
    return loaded


def test_two_sites_are_written_as_groups_and_a_link(tmp_path: object) -> None:
    cluster = read_again(result(*two_sites()).joined(NODE), tmp_path)
    assert [(group.name, group.nodes, group.devices_per_node) for group in cluster.groups] == [
        ("east", 2, 8),
        ("west", 2, 8),
    ]
    assert {(group.inter.bandwidth_gbps, group.inter.latency_us) for group in cluster.groups} == {(10, 300)}
    (link,) = cluster.links
    assert (link.between, link.bandwidth_gbps, link.latency_us, link.shared) == (("east", "west"), 0.5, 30000, False)
    assert "east: east-0.site east-1.site; west: west-2.site west-3.site" in cluster.source
    assert all(group.device == NODE.device for group in cluster.groups)


def test_a_way_back_that_is_slower_is_a_link_of_its_own(tmp_path: object) -> None:
    cluster = read_again(result(*two_sites(back=0.3)).joined(NODE), tmp_path)
    assert [(link.between, link.bandwidth_gbps) for link in cluster.links] == [
        (("east", "west"), 0.5), (("west", "east"), 0.3),
    ]  # fmt: skip


def test_alike_nodes_are_one_flat_cluster_at_the_rate_of_all_at_once(tmp_path: object) -> None:
    flat = np.full((4, 4), 10.0)
    cluster = read_again(result(np.full((4, 4), 20.0), flat).joined(NODE), tmp_path)
    assert (cluster.groups, cluster.nodes, cluster.inter.bandwidth_gbps, cluster.inter.latency_us) == ((), 4, 10, 20)
    thin = result(np.full((4, 4), 20.0), flat, ring_gbps=(4.0, 4.1, 3.9, 4.0))
    assert thin.joined(NODE).inter.bandwidth_gbps == 4


@pytest.mark.parametrize(("each", "shared", "rate"), [(0.26, True, 0.52), (0.48, False, 0.48)])
def test_pairs_that_get_less_together_share_a_line(tmp_path: object, each: float, shared: bool, rate: float) -> None:
    at_once = [AtOnce(groups=ways, pairs=2, alone_gbps=0.5, each_gbps=each) for ways in ((0, 1), (1, 0))]
    (link,) = read_again(result(*two_sites(), at_once=at_once).joined(NODE), tmp_path).links
    assert (link.shared, link.bandwidth_gbps) == (shared, rate)


def test_slower_devices_are_a_group_at_their_speed(tmp_path: object) -> None:
    alike = (np.full((4, 4), 20.0), np.full((4, 4), 10.0))
    cluster = read_again(result(*alike, speeds=[100, 101, 50, 51]).joined(NODE), tmp_path)
    first, second = (group.device.peak_tflops["bf16"] for group in cluster.groups)
    assert second / first == pytest.approx(50.5 / 100.5, rel=1e-3)
    assert [link.bandwidth_gbps for link in cluster.links] == [10]
