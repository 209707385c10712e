"""A probe of nodes in two regions, for real: namespaces with a matrix of links, a rank in each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from trimaran.bench.launch.network import enter
from trimaran.bench.launch.network.switch import DEVICE
from trimaran.bench.launch.network.switched import SwitchedNetwork
from trimaran.files.catalogue import dump_toml, load_cluster
from trimaran.nouns.shaped_network import ShapedNetwork, ShapedPair
from trimaran.probe.links_result import LinksResult
from trimaran.protocol.environment import RENDEZVOUS_FD

namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="network namespaces need root and /dev/net/tun"
)
NODES = 4
REGIONS = ShapedNetwork(
    name="two regions",
    latency_ms=2,
    bandwidth_gbps=0.2,
    pairs=tuple(ShapedPair(nodes=(u, v), latency_ms=25, bandwidth_gbps=0.04) for u in (0, 2) for v in (1, 3)),
)


def probe_links(switched: SwitchedNetwork, folder: Path) -> LinksResult:
    """What ranks on all nodes of a switch measure, as srun or torchrun would start them."""
    seats = {
        "namespaces": switched.namespaces, "addresses": switched.addresses, "nodes": list(range(NODES)),
        "slots": [0] * NODES, "paces": [""] * NODES, "device": DEVICE, "port": 29400, "rendezvous_fd": RENDEZVOUS_FD,
    }  # fmt: skip
    command = [sys.executable, "-I", "-S", enter.__file__, json.dumps(seats)]
    command += [sys.executable, "-m", "trimaran.probe.links", str(folder / "links.json")]
    with ExitStack() as started:
        ranks = []
        for rank in range(NODES):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(NODES), "OMP_NUM_THREADS": "1"}
            rank_process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            ranks.append(started.enter_context(rank_process))
            started.callback(ranks[-1].kill)
        said = [rank.communicate(timeout=500)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * NODES, "\n".join(said)
    return LinksResult.model_validate_json((folder / "links.json").read_text())


@namespaces
@pytest.mark.proof
@pytest.mark.timeout(600)
def test_nodes_in_two_regions_are_found_by_what_their_links_are(tmp_path: Path) -> None:
    with closing(SwitchedNetwork(REGIONS, NODES)) as switched:
        found = probe_links(switched, tmp_path)
    assert found.rounds == NODES - 1
    machine = load_cluster("fugaku-a64fx").model_copy(update={"nodes": 1, "name": "machine"})
    dump_toml(found.joined(machine), tmp_path / "cluster.toml")
    cluster = load_cluster(str(tmp_path / "cluster.toml"))
    assert found.groups == ((0, 2), (1, 3))
    near, far = ([group.inter for group in cluster.groups], list(cluster.links))
    for link, delay_us, gbps in [*((link, 2_000, 0.2) for link in near), *((link, 25_000, 0.04) for link in far)]:
        # a busy machine hands packets over late, never early, and no way is faster than it was made
        assert 0.95 * delay_us < link.latency_us < 4 * delay_us
        assert gbps / 2 < link.bandwidth_gbps < 1.1 * gbps
    assert not any(link.shared for link in far), "every two nodes have a way of their own"
