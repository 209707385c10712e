"""Claims about layouts that say where each rank stands: real ranks in namespaces, each on its own links and speed."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.bench.launch.contract import Launch, TrialRefusedError
from trimaran.bench.launch.local import LocalLauncher
from trimaran.bench.launch.network.measure import TOLERANCE
from trimaran.bench.launch.network.pace import require_quotas
from trimaran.bench.launch.network.shaped_launcher import ShapedLauncher
from trimaran.bench.launch.slurm.slurm_launcher import require_even, step_of
from trimaran.bench.sweep import run_sweep
from trimaran.bench.trial.trial import not_started, prepare_trial, run_once
from trimaran.bench.watch.limits import Limits
from trimaran.files.catalogue import dump_toml, load_cluster
from trimaran.files.row_nouns import nouns_of
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.layout.places import nodes_of, places
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.shaped_network import ShapedNetwork, ShapedNode, ShapedPair
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.sweep_settings import SweepSettings
from trimaran.report.measured_rows import records
from trimaran.store import Store
from trimaran.study.workspace import Workspace

namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="network namespaces need root and /dev/net/tun"
)
# Every two of four nodes have a delay (ms) of their own.
DELAYS_MS = dict(zip(combinations(range(4), 2), (4.0, 9.0, 15.0, 22.0, 30.0, 39.0), strict=True))
UNLIKE = ShapedNetwork(
    name="unlike",
    latency_ms=4,
    bandwidth_gbps=0.04,
    pairs=tuple(ShapedPair(nodes=pair, latency_ms=ms, bandwidth_gbps=0.04) for pair, ms in DELAYS_MS.items()),
)
# A rank that tells its own address, answers the pings of others, and pings those of higher rank.
PINGING = """
import json, os, socket, sys, threading, time
from pathlib import Path

folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
answers = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
answers.bind(("0.0.0.0", 40000))
def answer():
    while True:
        answers.sendto(*answers.recvfrom(64))
threading.Thread(target=answer, daemon=True).start()
towards = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
towards.connect((os.environ["MASTER_ADDR"], 1))
(folder / f".address.{rank}").write_text(towards.getsockname()[0])
(folder / f".address.{rank}").rename(folder / f"address.{rank}")
trips = {}
for other in range(rank + 1, world):
    told = folder / f"address.{other}"
    while not told.exists():
        time.sleep(0.02)
    pings = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    pings.connect((told.read_text(), 40000))
    pings.settimeout(10)
    seconds = []
    for _ in range(15):
        begin = time.perf_counter()
        pings.send(b"ping")
        pings.recv(64)
        seconds.append(time.perf_counter() - begin)
    trips[other] = min(seconds)
(folder / f".trips.{rank}").write_text(json.dumps(trips))
(folder / f".trips.{rank}").rename(folder / f"trips.{rank}")
while not all((folder / f"trips.{other}").exists() for other in range(world)):
    time.sleep(0.02)
"""


def ended(ranks: object, within_s: float = 60.0) -> tuple[int | None, ...]:
    deadline = time.monotonic() + within_s
    while None in (codes := ranks.exit_codes()) and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(0.05)
    return codes


def placed_launch(layout: Layout, cluster: Cluster, folder: Path, program: str, *arguments: str) -> Launch:
    return Launch(
        (sys.executable, "-c", program, *arguments), layout.devices, folder,
        ranks_per_node=cluster.devices_per_node, places=places(layout, cluster),
    )  # fmt: skip


@pytest.mark.proof
@namespaces
def test_between_two_ranks_lies_the_way_of_the_nodes_that_they_are_placed_on(cluster: Cluster, tmp_path: Path) -> None:
    layout = parse_layout("pp4,mbs1,on2.0.3.1")
    ranks = ShapedLauncher(UNLIKE).start(
        placed_launch(layout, cluster.on(UNLIKE), tmp_path, PINGING, str(tmp_path))
    )  # fmt: skip
    try:
        assert ended(ranks) == (0, 0, 0, 0), [path.read_text() for path in tmp_path.glob("stderr.*")]
    finally:
        ranks.kill()
    for rank in range(4):
        for other, seconds in json.loads((tmp_path / f"trips.{rank}").read_text()).items():
            nodes = tuple(sorted((layout.placed[rank], layout.placed[int(other)])))
            measured_ms = seconds / 2 * 1e3
            # a busy machine lengthens a trip, but not to that of another pair
            assert measured_ms >= DELAYS_MS[nodes] * (1 - TOLERANCE)
            assert min(DELAYS_MS, key=lambda pair: abs(DELAYS_MS[pair] - measured_ms)) == nodes


# A network that is not as asked for while other programs run is refused, and may be as asked for a moment later.
TRIES = 4

TWO_EACH = ShapedNetwork(name="two nodes", latency_ms=2, bandwidth_gbps=0.2, ranks_per_node=2)


@namespaces
@pytest.mark.proof
def test_a_placed_training_has_the_losses_of_the_unplaced_and_sends_what_its_places_make_it_send(
    trainable: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    # Ranks 0 and 1 are the replicas of the first stage: in their order on one node, placed on two.
    workspace, shaped = Workspace(tmp_path), cluster.on(TWO_EACH)
    layouts = [parse_layout(f"dp2,pp2,mbs1{placed}") for placed in ("", ",on0.2.1.3", ",on3.2.1.0")]
    with Store(workspace.store) as store:
        rows = run_sweep(
            trainable, shaped, layouts, store,
            data_dir=workspace.data(trainable), work_dir=workspace.trials, limits=Limits(timeout_s=250),
        )  # fmt: skip
        stored = store.measurements()
    assert [row.status for row in rows] == ["ok"] * 3, [row.evidence for row in rows]
    in_order, across, turned = rows
    assert across.losses == turned.losses == in_order.losses
    assert len({row.trial_key for row in rows}) == 3, "a layout elsewhere is another trial"
    assert [row.nodes for row in rows] == [2, 2, 2]
    whole = [nouns_of(row.model_copy(update={"cluster": "aws-p3-16xlarge"})).layout for row in stored]
    assert [layout.placed for layout in whole] == [layout.placed for layout in layouts]
    sent_mib = [float((row.notes or "").split("switch carried ")[1].split(" MiB")[0]) for row in rows]
    # In order only what stages send each other crosses; placed, every step's gradients do (4 bytes, there and back).
    layer, embedding = 12 * 64**2, 384 * 64
    gradients_mib = 2 * 4 * (4 * layer + 2 * embedding) * len(in_order.losses) / 2**20
    assert sent_mib[1] > gradients_mib > 1.5 * sent_mib[0]
    assert sent_mib[2] == pytest.approx(sent_mib[0], rel=0.1)


# Tells its share of a core over a second in which it does nothing but compute.
SPINNING = """
import time
begin, used = time.perf_counter(), time.process_time()
while time.perf_counter() - begin < 1.0:
    pass
print((time.process_time() - used) / (time.perf_counter() - begin))
"""


def quotas_can_be_set() -> bool:
    try:
        require_quotas(
            ShapedNetwork(name="q", latency_ms=1, bandwidth_gbps=1, nodes=(ShapedNode(node=0, cpu_share=0.5),))
        )
    except TrimaranError:
        return False
    return True


@namespaces
@pytest.mark.skipif(not quotas_can_be_set(), reason="quotas of CPU time need the cpu controller of control groups")
def test_ranks_on_a_slow_node_get_their_share_of_a_core_and_leave_no_group(cluster: Cluster, tmp_path: Path) -> None:
    network = UNLIKE.model_copy(update={"nodes": (ShapedNode(node=1, cpu_share=0.2),)})
    shaped, layout = cluster.on(network), parse_layout("pp2,mbs1,on1.0")
    ranks = ShapedLauncher(network).start(placed_launch(layout, shaped, tmp_path, SPINNING))
    groups = [Path(file).parent for file in ranks.slowed_by if file]
    try:
        assert len(groups) == 1
        assert all(group.is_dir() for group in groups)
        assert ended(ranks) == (0, 0)
    finally:
        ranks.kill()
    # neighbours may take more from it, a quota never gives more than it has
    assert float((tmp_path / "stdout.0").read_text()) < 0.2 * (1 + TOLERANCE)
    assert not any(group.exists() for group in groups)
    measured = (tmp_path / "network.txt").read_text().split("node 1 measured ")[1].split(" of its speed")[0]
    assert float(measured) == pytest.approx(0.2, rel=TOLERANCE)


@namespaces
@pytest.mark.proof
@pytest.mark.skipif(not quotas_can_be_set(), reason="quotas of CPU time need the cpu controller of control groups")
def test_a_training_with_fewer_layers_on_a_slow_node_has_the_losses_of_one_that_shares_them_evenly(
    trainable: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    workspace, rows = Workspace(tmp_path), []
    slow = TWO_EACH.model_copy(
        update={"ranks_per_node": 1, "nodes": (ShapedNode(node=1, cpu_share=0.25),), "name": "slow node"}
    )
    with Store(workspace.store) as store:
        for network, layout in (
            (TWO_EACH.model_copy(update={"ranks_per_node": 1}), "pp2,mbs1,split2-2"),
            (slow, "pp2,mbs1,split3-1"),
        ):
            for _ in range(TRIES):
                (row,) = run_sweep(
                    trainable, cluster.on(network), [parse_layout(layout)], store,
                    data_dir=workspace.data(trainable), work_dir=workspace.trials, limits=Limits(timeout_s=250),
                    retry=frozenset({"not_run"}),
                )  # fmt: skip
                if row.status != "not_run":
                    break
            rows.append(row)
    assert [row.status for row in rows] == ["ok", "ok"], [row.evidence for row in rows]
    even, uneven = rows
    assert uneven.losses == pytest.approx(even.losses, rel=1e-5)
    assert "of its speed" in (uneven.notes or "")
    assert "of its speed" not in (even.notes or "")
    assert uneven.variant == "network=slow node"


def test_a_share_of_a_node_that_is_not_there_or_is_stated_twice_is_refused_in_a_line(cluster: Cluster) -> None:
    beyond = UNLIKE.model_copy(update={"nodes": (ShapedNode(node=7, cpu_share=0.5),)})
    with pytest.raises(
        TrimaranError, match="states a cpu_share of node 7, but the machine has 4 nodes of 1 ranks: 0 to 3"
    ):
        ShapedLauncher.asked_for(SweepSettings(), cluster.on(beyond), print)
    with pytest.raises(ValueError, match="nodes states node 1 2 times: give it one cpu_share"):
        ShapedNetwork(
            name="twice", latency_ms=1, bandwidth_gbps=1, nodes=(ShapedNode(node=1, cpu_share=0.5),) * 2
        )  # fmt: skip
    half = UNLIKE.model_copy(update={"nodes": (ShapedNode(node=1, cpu_share=0.5),)})
    assert [half.speed(node) for node in (0, 1)] == [1, 0.5]


def on_two_nodes(devices: str, folder: Path, cluster: Cluster) -> Launch:
    two = cluster.model_copy(update={"nodes": 2})
    return placed_launch(parse_layout(f"dp4,mbs1,on{devices}"), two, folder, "pass")


def test_one_machine_refuses_ranks_that_are_placed_on_two(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(TrialRefusedError, match="ranks are placed on 2 nodes, and this machine is one"):
        LocalLauncher().start(on_two_nodes("0.5.1.4", tmp_path, cluster))
    assert not list(tmp_path.iterdir())


def test_ranks_of_one_machine_have_the_number_of_the_device_that_they_are_placed_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    layout = parse_layout("dp3,mbs1,on3.0.2")
    tells = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])"
    launcher = LocalLauncher()
    ranks = launcher.start(placed_launch(layout, cluster, tmp_path, tells))
    assert ended(ranks) == (0, 0, 0)
    ranks.kill()
    launcher.close()
    assert [(tmp_path / f"stdout.{rank}").read_text().split() for rank in range(3)] == [
        ["0", "3", "3"], ["1", "0", "3"], ["2", "2", "3"],
    ]  # fmt: skip


def test_slurm_starts_as_many_tasks_on_each_node_and_refuses_other_places(cluster: Cluster, tmp_path: Path) -> None:
    even = on_two_nodes("0.5.1.4", tmp_path, cluster)
    require_even(even)
    assert even.shares == ((0, 2), (3, 1))
    step = step_of(even, SlurmSettings(), 2, "7")
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--distribution=block"} <= {*step}
    with pytest.raises(TrialRefusedError, match="placed 3 on one node and 1 on another"):
        require_even(on_two_nodes("0.5.1.2", tmp_path, cluster))


def test_places_among_unlike_nodes_that_nothing_tells_apart_are_a_row_that_was_not_run(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    groups = load_cluster("dtfm-two-universities").groups
    unlike = load_cluster("dtfm-two-universities")
    assert len(groups) > 1
    layout = parse_layout("dp2,mbs1,on3.40")
    trial = replace(
        prepare_trial(recipe, cluster, parse_layout("dp2,mbs1"), data_dir=tmp_path, work_dir=tmp_path / "runs"),
        cluster=unlike,
    )
    trial = replace(trial, job=trial.job.model_copy(update={"layout": layout}))
    row = run_once(trial, LocalLauncher(), Limits(timeout_s=10)).row
    assert row.status == "not_run"
    assert f"placed among groups {groups[0].name}, {groups[1].name}" in (row.evidence or "")


def test_a_trial_is_another_on_other_devices_and_beside_a_slow_node(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    half = UNLIKE.model_copy(update={"nodes": (ShapedNode(node=1, cpu_share=0.5),)})
    trials = [
        prepare_trial(recipe, cluster.on(network), parse_layout(layout), data_dir=tmp_path, work_dir=tmp_path / "runs")
        for network in (UNLIKE, half)
        for layout in ("pp4,mbs1", "pp4,mbs1,on3.2.1.0", "pp4,mbs1,on2.3.1.0")
    ]
    assert len({trial.key for trial in trials}) == len({trial.job.out_dir for trial in trials}) == 6


def test_tables_of_rows_say_on_which_devices_ranks_were_placed() -> None:
    row = Measurement.model_validate(
        {"layers": 4, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 257, "mbs": 1, "gbs": 8, "dp": 4, "devices": 4,
         "nodes": 1, "layout_label": "dp4,tp1,pp1,mbs1,on3.0-2"}
    )  # fmt: skip
    in_order = row.model_copy(update={"layout_label": "dp4,tp1,pp1,mbs1"})
    assert [record["placed"] for record in records([row, in_order])] == ["3.0-2", None]


@given(st.data())
def test_the_shares_of_a_launch_have_every_rank_once_and_on_its_own_node(data: st.DataObject) -> None:
    nodes, per_node = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    devices = data.draw(st.lists(st.integers(0, nodes * per_node - 1), min_size=1, unique=True))
    cluster = load_cluster("aws-p3-16xlarge").model_copy(update={"nodes": nodes, "devices_per_node": per_node})
    layout = Layout(dp=len(devices), placed=tuple(devices))
    launch = Launch((), len(devices), Path(), ranks_per_node=per_node, places=places(layout, cluster))
    assert sorted(rank for share in launch.shares for rank in share) == list(range(len(devices)))
    assert len(launch.shares) == nodes_of(layout, cluster)
    for share in launch.shares:
        assert len({devices[rank] // per_node for rank in share}) == 1
        assert [devices[rank] % per_node for rank in share] == sorted(launch.slot(rank) for rank in share)


def test_a_row_of_ranks_on_a_part_of_a_node_is_read_as_they_stood(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    """Devices are numbered by those of a node: of a row that named fewer, ranks of one node were read as on two."""
    here = tmp_path / "here.toml"
    dump_toml(cluster.model_copy(update={"nodes": 2}), here)
    trial = prepare_trial(
        recipe, load_cluster(str(here)), parse_layout("dp2,mbs1,on1.2"), data_dir=tmp_path, work_dir=tmp_path
    )
    row = not_started(trial, TrimaranError("not run")).row
    nouns = nouns_of(row.model_copy(update={"cluster": str(here)}))
    assert (row.nodes, nodes_of(nouns.layout, nouns.cluster)) == (1, 1)
