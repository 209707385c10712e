"""A probe that srun starts on two nodes measures the link between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.files.catalogue import load_cluster


def probe(folder: Path, *where: str) -> subprocess.CompletedProcess[str]:
    start = ["srun", "--exclusive", "--cpu-bind=none", "--mpi=none", *where, sys.executable, "-m", "trimaran"]
    arguments = ["probe", "--quick", "--slots", "1", "-o", "cluster.toml"]
    return subprocess.run([*start, *arguments], cwd=folder, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_probe_on_two_nodes_measures_the_link_between_them(tmp_path: Path) -> None:
    done = probe(tmp_path, "--nodes=2", "--ntasks-per-node=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cluster file written to cluster.toml") == 1, "rank 0 alone speaks"
    cluster = load_cluster(str(tmp_path / "cluster.toml"))
    assert (cluster.nodes, cluster.devices_per_node) == (2, 1)
    assert cluster.inter != cluster.intra
    # both are this machine's loopback, which takes longer than a copy of memory and less than a network far away
    assert 0.01 < cluster.inter.bandwidth_gbps < 1000 and 1 < cluster.inter.latency_us < 1e6
    assert "links of 1 of 1 pairs of 2 nodes, 2 ranks each; the slowest, from " in cluster.source


@pytest.mark.proof
def test_ranks_of_one_node_have_no_link_to_measure(tmp_path: Path) -> None:
    done = probe(tmp_path, "--nodes=1", "--ntasks-per-node=2")
    assert done.returncode == 2
    assert done.stderr.count("trimaran: probe: all 2 ranks are on one node: start it on two or more") == 1
    assert not (tmp_path / "cluster.toml").exists()
