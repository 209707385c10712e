"""Claims about shaped networks: real namespaces, real packets, real ranks."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from itertools import combinations
from pathlib import Path

import pytest

from trial_helpers import fake_worker, processes_that_name
from trimaran.bench.launch.contract import RESTARTS
from trimaran.bench.launch.joined import Joined
from trimaran.bench.launch.network.measure import TOLERANCE, LinkCheck, Way, measure_links
from trimaran.bench.launch.network.shaped_launcher import ShapedLauncher
from trimaran.bench.launch.network.switched import SwitchedNetwork
from trimaran.bench.sweep import run_sweep
from trimaran.bench.trial.trial import prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.shaped_network import ShapedNetwork, ShapedPair
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.recipe import Recipe
from trimaran.store import Store
from trimaran.study.train_recipe import fastest_layout, train_recipe
from trimaran.study.workspace import Workspace

namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="network namespaces need root and /dev/net/tun"
)
NEAR = ShapedNetwork(name="near", latency_ms=4, bandwidth_gbps=0.2)
FAR = ShapedNetwork(name="far", latency_ms=25, bandwidth_gbps=0.04)
CAP_SYS_ADMIN, PR_CAPBSET_DROP = 21, 24  # linux/capability.h, linux/prctl.h


def measured(network: ShapedNetwork, nodes: int) -> LinkCheck:
    """As before a trial: a busy machine gets three tries."""
    with closing(SwitchedNetwork(network, nodes)) as switched:
        for _ in range(3):
            check = measure_links(switched)
            if check.refusal is None:
                break
    return check


@namespaces
@pytest.mark.parametrize("network", [NEAR, FAR], ids=lambda network: network.name)
def test_a_shaped_link_has_the_delay_and_the_rate_that_were_asked_for(network: ShapedNetwork) -> None:
    check = measured(network, 2)
    assert check.refusal is None
    assert check.delay_ms == pytest.approx(network.latency_ms, rel=TOLERANCE)
    assert check.gbps == pytest.approx(network.bandwidth_gbps, rel=TOLERANCE)


@namespaces
def test_every_pair_may_have_a_delay_and_a_rate_of_its_own() -> None:
    pair = ShapedPair(nodes=(0, 2), latency_ms=15, bandwidth_gbps=0.05)
    ways = {(way.source, way.target): way for way in measured(NEAR.model_copy(update={"pairs": (pair,)}), 3).ways}
    for source, target in combinations(range(3), 2):
        slow = (source, target) == (0, 2)
        assert ways[source, target].delay_ms == pytest.approx(15 if slow else 4, rel=TOLERANCE)
        assert ways[source, target].gbps == pytest.approx(0.05 if slow else 0.2, rel=TOLERANCE)


@namespaces
def test_what_comes_from_far_does_not_hold_up_what_arrives_before_it() -> None:
    """Nodes 0 and 1 send to node 2 at once, of which one is far away."""
    network = NEAR.model_copy(update={"pairs": (ShapedPair(nodes=(0, 2), latency_ms=200, bandwidth_gbps=0.2),)})
    with closing(SwitchedNetwork(network, 3)) as switched, contextlib.ExitStack() as stack:
        ends = [stack.enter_context(switched.open_socket(node, socket.SOCK_DGRAM)) for node in range(3)]
        for end, address in zip(ends, switched.addresses, strict=True):
            end.bind((address, 4000))
            end.settimeout(5)
        begun = time.monotonic()
        for sender in (0, 1):
            ends[sender].sendto(bytes([sender]), (switched.addresses[2], 4000))
        arrived = {ends[2].recv(8)[0]: time.monotonic() - begun for _ in range(2)}
    assert list(arrived) == [1, 0]
    assert arrived[0] >= 0.2 > 2 * arrived[1]


def test_a_link_outside_the_tolerance_is_refused_with_both_numbers() -> None:
    good = Way(source=0, target=1, asked_ms=10, asked_gbps=1, delay_ms=10.9, gbps=0.91)
    slow = Way(source=2, target=1, asked_ms=10, asked_gbps=1, delay_ms=11.5, gbps=0.8)
    assert LinkCheck((good,)).refusal is None
    refusal = LinkCheck((good, slow)).refusal
    assert refusal == "rate from node 2 to 1 is 0.8 Gbit/s, asked were 1 Gbit/s: 20% off, 10% are allowed"


@namespaces
def test_the_hosts_own_network_is_not_touched() -> None:
    def host() -> tuple[object, ...]:
        return socket.if_nameindex(), Path("/proc/net/route").read_text(), sorted(Path("/run").glob("netns/*"))

    before = host()
    with closing(SwitchedNetwork(NEAR, 2)) as switched:
        during = host()
        inside = switched.open_socket(0, socket.SOCK_DGRAM)
        inside.bind((switched.addresses[0], 0))  # an address that the host does not have
        inside.close()
    assert before == during == host()


@pytest.fixture
def text_recipe(recipe: Recipe, tmp_path: Path) -> Recipe:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 200)
    model = recipe.workload.model.model_copy(update={"vocab": 384})
    return recipe.model_copy(
        update={
            "data": DataSettings(paths=(str(text),), tokenizer="bytes"),
            "workload": recipe.workload.model_copy(update={"model": model}),
        }
    )


@pytest.mark.proof
@namespaces
def test_a_real_trial_runs_over_the_shaped_link_and_its_row_says_so(
    text_recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    workspace, shaped = Workspace(tmp_path), cluster.on(NEAR)
    with Store(workspace.store) as store:
        (row,) = run_sweep(
            text_recipe, shaped, [parse_layout("dp2,mbs2")], store,
            data_dir=workspace.data(text_recipe), work_dir=workspace.trials, limits=Limits(timeout_s=250),
        )  # fmt: skip
    assert row.status == "ok", row.evidence
    assert row.losses[0] == pytest.approx(math.log(384), abs=0.5)
    assert (row.nodes, row.devices_per_node, row.network_delay_ms, row.network_gbps) == (2, 1, 4, 0.2)
    assert row.variant == "network=near"
    # Each rank's gradients cross the link in every step: they went through the switch, not through shared memory.
    weights = 4 * (4 * 12 * 64**2 + 384 * 64)
    carried_mib = float((row.notes or "").split("switch carried ")[1].split(" MiB")[0])
    assert carried_mib * 2**20 > row.devices * len(row.losses) * weights
    assert (row.notes or "").startswith("link measured ")
    assert min(row.step_times_s) > 2 * weights * 8 / 0.2e9 / 2, "no step is faster than its bytes"


@namespaces
def test_a_trial_whose_link_cannot_be_carried_is_a_row_that_was_not_run(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    shaped = cluster.on(ShapedNetwork(name="too fast", latency_ms=0.5, bandwidth_gbps=100))
    row = run_fake_on(shaped, recipe, tmp_path, "ok")
    assert row.status == "not_run"
    assert "Gbit/s, asked were 100 Gbit/s" in (row.evidence or "")


def run_fake_on(
    shaped: Cluster, recipe: Recipe, folder: Path, behaviour: str, on_step: Callable[[int], None] = lambda step: None
) -> Measurement:
    trial = prepare_trial(recipe, shaped, parse_layout("dp2,mbs1"), data_dir=folder, work_dir=folder / "runs")
    return run_trial(
        trial, ShapedLauncher(shaped.shaped), Limits(timeout_s=30), worker=fake_worker(behaviour), on_step=on_step
    )  # fmt: skip


@namespaces
def test_a_training_begins_with_what_was_measured_on_its_network(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    """Rows of a shaped network matched no recipe: after tune, train asked for tune."""
    workspace, layout = Workspace(tmp_path), parse_layout("dp2,mbs1")
    row = run_fake_on(cluster.on(NEAR), recipe, tmp_path, "ok")
    assert row.status == "ok", row.evidence
    with Store(workspace.store) as store:
        store.add(row)

    def on(*networks: ShapedNetwork) -> Recipe:
        return recipe.model_copy(update={"sweep": recipe.sweep.model_copy(update={"networks": networks})})

    assert fastest_layout(on(NEAR), workspace) == layout
    others = [
        (),
        (FAR,),
        (NEAR, FAR),
        (NEAR.model_copy(update={"latency_ms": 5}),),
        (NEAR.model_copy(update={"scale": 2.0}),),
    ]
    assert [fastest_layout(on(*networks), workspace) for networks in others] == [None] * len(others)
    with pytest.raises(TrimaranError, match=r"network 'near' is shaped around ranks.*leave \[\[sweep.networks\]\] out"):
        train_recipe(
            on(NEAR).model_copy(update={"cluster": cluster}), workspace, layout, show=lambda steps: nullcontext(print),
            say=print, joined=Joined(0, 2, {}),
        )  # fmt: skip


@pytest.mark.proof
@namespaces
def test_a_switch_that_dies_is_told_and_takes_its_ranks_along(
    recipe: Recipe, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switches: list[int] = []
    start = SwitchedNetwork.__init__

    def noted(self: SwitchedNetwork, network: ShapedNetwork, nodes: int) -> None:
        start(self, network, nodes)
        switches.append(self.process_id)

    monkeypatch.setattr(SwitchedNetwork, "__init__", noted)
    row = run_fake_on(cluster.on(NEAR), recipe, tmp_path, "hang", lambda step: os.kill(switches[-1], signal.SIGKILL))
    assert row.status == "lost"
    assert "the switch of network 'near' ended with status -9" in (row.evidence or "")
    assert len(switches) == 1 + RESTARTS, "it was run again, in a network of its own each time"
    assert not processes_that_name(str(tmp_path))


SWEEP = """
import sys, time
from pathlib import Path
from trimaran.bench.launch.contract import Launch
from trimaran.bench.launch.network.shaped_launcher import ShapedLauncher
from trimaran.nouns.shaped_network import ShapedNetwork

out_dir = Path(sys.argv[1])
network = ShapedNetwork(name="near", latency_ms=4, bandwidth_gbps=0.2)
rank = "import os, sys, time; print(os.stat('/proc/self/ns/net').st_ino, flush=True); time.sleep(600)"
ranks = ShapedLauncher(network).start(Launch((sys.executable, "-c", rank, str(out_dir)), 2, out_dir))
print(ranks._switched.process_id, flush=True)
time.sleep(600)
"""


def network_namespaces() -> set[int]:
    """Network namespaces in which any process of this machine is."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(link.stat().st_ino)
        except OSError:
            continue
    return found


def eventually(true: Callable[[], bool], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


@namespaces
def test_a_killed_sweep_leaves_no_process_and_no_namespace(tmp_path: Path) -> None:
    sweep = subprocess.Popen([sys.executable, "-c", SWEEP, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert sweep.stdout is not None
    switch = int(sweep.stdout.readline())
    printed = [tmp_path / f"stdout.{rank}" for rank in range(2)]
    assert eventually(lambda: all(file.read_text().strip() for file in printed))
    nodes = {int(file.read_text()) for file in printed}
    assert len(nodes) == 2
    assert nodes <= network_namespaces()
    sweep.kill()
    sweep.wait()
    assert eventually(lambda: not Path(f"/proc/{switch}").exists())
    assert eventually(lambda: not processes_that_name(str(tmp_path)))
    assert eventually(lambda: not nodes & network_namespaces())


UNPRIVILEGED = f"""
import ctypes, sys
from trimaran.cli import main

ctypes.CDLL(None).prctl({PR_CAPBSET_DROP}, {CAP_SYS_ADMIN}, 0, 0, 0)  # what a program is started with, root or not
sys.argv[1:] = ["bench", sys.argv[1], "--runs", sys.argv[2]]
main()
"""


def test_without_the_right_to_make_namespaces_the_refusal_is_one_clear_line_before_anything_is_made(
    tmp_path: Path,
) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "network-laptop.toml"
    runs = tmp_path / "runs"
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(recipe), str(runs)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "network 'default' cannot be shaped here: " in done.stderr
    assert "run as root on Linux with network namespaces" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout
    assert not runs.exists()


def test_a_network_that_the_machine_cannot_seat_is_refused(cluster: Cluster) -> None:
    with pytest.raises(TrimaranError, match=r"puts 9 ranks on a node, but the machine has 4 devices"):
        cluster.on(NEAR.model_copy(update={"ranks_per_node": 9}))
    gpu = cluster.model_copy(update={"device": cluster.device.model_copy(update={"kind": "gpu"})})
    with pytest.raises(TrimaranError, match=r"use a CPU cluster"):
        gpu.on(NEAR)
    far_pair = NEAR.model_copy(update={"pairs": (ShapedPair(nodes=(0, 5), latency_ms=1, bandwidth_gbps=1),)})
    with pytest.raises(TrimaranError, match=r"a pair of node 5, but the machine has 4 nodes of 1 ranks: 0 to 3"):
        cluster.on(far_pair)


def test_a_slower_network_is_predicted_to_be_slower_and_cores_are_shared_by_all_nodes(
    recipe: Recipe, cluster: Cluster
) -> None:
    layout = parse_layout("pp4,mbs1,gpipe")
    near, far = cluster.on(NEAR), cluster.on(FAR)
    assert near.inter.latency_us == 4000
    assert near.devices == cluster.devices
    found = [estimate(Case.of(recipe.workload, one, recipe.stack), layout) for one in (cluster, near, far)]
    seconds = [one.time for one in found]
    # GPipe of 8 micro-batches waits at least for two delays and the bytes of 7 of them, forward and backward.
    message = 32 * 64 * 4
    for network, one in ((NEAR, found[1]), (FAR, found[2])):
        paced = 2 * network.latency_ms * 1e-3 + message * 8e-9 / network.bandwidth_gbps
        assert one.sec_per_it > 2 * 7 * paced
    assert seconds[0].pp < seconds[1].pp < seconds[2].pp
    assert seconds[0].forward == pytest.approx(seconds[1].forward), "four ranks share two cores, namespaces or not"
