"""Clusters of groups: what a file states, and how a slip in it is told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimaran.files.catalogue import dump_toml, load_cluster
from trimaran.nouns.noun import TrimaranError

TWO = """
device = "v100-sxm2-16gb"
devices_per_node = 1
intra = { bandwidth_gbps = 100, latency_us = 5 }

[[groups]]
name = "ohio"
nodes = 3
inter = { bandwidth_gbps = 5, latency_us = 1000 }

[[groups]]
name = "virginia"
nodes = 2
devices_per_node = 4
inter = { bandwidth_gbps = 8, latency_us = 500 }

[[links]]
between = ["ohio", "virginia"]
bandwidth_gbps = 1.12
latency_us = 11000
"""


def cluster_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_what_groups_leave_out_is_as_the_cluster_states_and_the_whole_is_nowhere_better_than_they_are(
    tmp_path: Path,
) -> None:
    cluster = load_cluster(str(cluster_of(tmp_path, TWO)))
    assert [group.devices_per_node for group in cluster.groups] == [1, 4]
    assert cluster.devices == 3 + 2 * 4
    assert (cluster.inter.bandwidth_gbps, cluster.inter.latency_us) == (1.12, 11000)
    assert cluster.intra.bandwidth_gbps == 100


def test_a_cluster_of_groups_that_is_written_is_read_back_as_it_was(tmp_path: Path) -> None:
    cluster = load_cluster("dtfm-four-regions")
    dump_toml(cluster, tmp_path / "written.toml")
    assert load_cluster(str(tmp_path / "written.toml")) == cluster


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[[links]]\nbetween", "[[other]]\nbetween", "other"),
        (TWO[TWO.index("[[links]]") :], "", "links between ohio and virginia are missing"),
        ("bandwidth_gbps = 1.12", "bandwidth_gbps = 0", "links 1, between ohio and virginia: bandwidth_gbps"),
        ("bandwidth_gbps = 1.12", "bandwidth_gbps = nan", "links 1, between ohio and virginia: bandwidth_gbps"),
        (
            "latency_us = 11000",
            "latency_us = 11000\none_way = true",
            "none leads back: state one from virginia",
        ),
        ('"virginia"]', '"virgnia"]', "'virgnia' is no group, did you mean 'virginia'?"),
        ('"ohio", "virginia"]', '"ohio", "ohio"]', "'ohio' and itself"),
        (TWO[TWO.index("[[groups]]") :], "groups = [3]", "groups is [3], expected sections [[groups]]"),
        ("[[links]]", "[links]", "expected sections [[links]]"),
        ('name = "virginia"', 'name = "ohio"', "the name 'ohio' 2 times"),
        ("nodes = 3", "nodes = 0", "groups 1, ohio: nodes"),
        ("nodes = 3", "nodez = 3", "groups 1, ohio: 'nodez' is not known: did you mean 'nodes'?"),
        ("devices_per_node = 1\n", "devices_per_node = 1\nnodes = 9\n", "nodes is 9, but the groups state theirs"),
    ],
)
def test_a_slip_in_groups_or_links_is_named_in_one_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in TWO
    with pytest.raises(TrimaranError) as refused:
        load_cluster(str(cluster_of(tmp_path, TWO.replace(old, new, 1))))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_links_without_groups_are_refused() -> None:
    flat = load_cluster("dgx-h100")
    links = load_cluster("dtfm-two-universities").links
    with pytest.raises(ValueError, match="the cluster has none: state groups, or inter"):
        type(flat).model_validate({**dict(flat), "links": links})
