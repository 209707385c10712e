"""Claims about sweeps on a real Ray of two nodes: what its actors start ends as what runs here, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
from raylets import Raylets

from command import tiny_recipe
from trial_helpers import LIMITS, fake_worker
from trimaran.bench.launch.contract import Launch
from trimaran.bench.launch.ray.ray_cluster import RayCluster
from trimaran.bench.launch.ray.ray_launcher import bundle_of
from trimaran.bench.launchers import launcher_of
from trimaran.bench.sweep import run_sweep
from trimaran.bench.trial.trial import prepare_trial, run_once
from trimaran.bench.watch.limits import Limits
from trimaran.files.catalogue import load_cluster
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.recipe.ray_settings import RaySettings
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.sweep_settings import SweepSettings
from trimaran.store import Store
from trimaran.study.stated import runnable_recipe
from trimaran.study.workspace import Workspace

# How each layout's ranks behave, its status, and how its evidence begins.
ENDS = {
    "dp4,tp1,pp1,mbs1": ("ok", "ok", None),
    "dp4,tp1,pp1,mbs2": ("oom", "oom", "rank 3 ran out of memory: DefaultCPUAllocator: can't allocate memory"),
    "dp2,tp2,pp1,mbs1": ("segfault", "crash", "rank 3 was killed by SIGSEGV"),
    "dp2,tp2,pp1,mbs2": ("fail", "fail", "rank 3 left with status 1: ValueError: the data has run out"),
    "dp1,tp4,pp1,mbs1": ("hang", "hang", r"rank \d gave no sign for [\d.]+ s after step 2"),
    "dp1,tp2,pp1,mbs1": ("leave-children", "ok", None),
    "dp4,tp1,pp1,mbs1,on3.0.2.1": ("ok", "ok", None),
}


def test_every_end_on_ray_has_its_status_and_its_reason(on_ray: Recipe, two_nodes: Cluster, tmp_path: Path) -> None:
    layouts = [parse_layout(text) for text in ENDS]
    worker = fake_worker(json.dumps({text: behaviour for text, (behaviour, _, _) in ENDS.items()}))
    with Store(tmp_path / "store.sqlite") as store:
        rows = run_sweep(
            on_ray, two_nodes, layouts, store, data_dir=tmp_path, work_dir=tmp_path / "runs", worker=worker,
            limits=Limits(timeout_s=60, start_s=30, hang_s=4, peers_s=3),
        )  # fmt: skip
    assert [row.status for row in rows] == [status for _, status, _ in ENDS.values()], [row.evidence for row in rows]
    for row, (_, _, says) in zip(rows, ENDS.values(), strict=True):
        assert says is None or re.search(says, (row.evidence or "").splitlines()[0])
        if row.status == "hang":
            assert (row.evidence or "").count("in sleep_for_ever") == 4, row.evidence
    assert [row.nodes for row in rows] == [2, 2, 2, 2, 2, 1, 2]
    (result,) = (tmp_path / "runs").glob("dp4,tp1,pp1,mbs1-*/result.json")
    saw = json.loads(result.read_text())["ranks_saw"]
    assert (saw["LOCAL_RANK"], saw["LOCAL_WORLD_SIZE"], saw["niceness"]) == ("0", "2", os.nice(0))
    (result,) = (tmp_path / "runs").glob("dp4,tp1,pp1,mbs1,on*/result.json")
    saw = json.loads(result.read_text())["ranks_saw"]
    assert (saw["LOCAL_RANK"], saw["LOCAL_WORLD_SIZE"]) == ("1", "2"), "placed on the second device of its node"


def test_more_nodes_than_ray_gives_are_waited_for_and_then_refused_before_the_first_trial(
    on_ray: Recipe, settings: RaySettings, two_nodes: Cluster, tmp_path: Path
) -> None:
    brief = settings.model_copy(update={"wait_min": 0.01})
    recipe = on_ray.model_copy(update={"sweep": on_ray.sweep.model_copy(update={"ray": brief})})
    larger = two_nodes.model_copy(update={"nodes": 4})
    with Store(tmp_path / "store.sqlite") as store:
        with pytest.raises(TrimaranError, match=r"did not give 4 nodes of CPU 2 in 0\.01 min, 2 are there"):
            run_sweep(
                recipe, larger, [parse_layout("dp1,mbs1"), parse_layout("dp8,mbs1")], store, data_dir=tmp_path,
                work_dir=tmp_path / "runs", limits=LIMITS, worker=fake_worker("ok"),
            )  # fmt: skip
        assert store.measurements() == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.proof
@pytest.mark.timeout(900)  # a busy machine loads PyTorch slowly
def test_two_nodes_train_for_real(trainable: Recipe, settings: RaySettings, two_nodes: Cluster, tmp_path: Path) -> None:
    real = trainable.model_copy(update={"sweep": trainable.sweep.model_copy(update={"ray": settings})})
    workspace = Workspace(tmp_path)
    layouts = [parse_layout("dp2,pp2,mbs2"), parse_layout("dp1,mbs4")]
    with Store(workspace.store) as store:
        rows = run_sweep(
            real, two_nodes, layouts, store, data_dir=workspace.data(real), work_dir=workspace.trials,
            limits=Limits(timeout_s=250),
        )  # fmt: skip
    for row in rows:
        assert row.status == "ok", row.evidence
    assert [row.nodes for row in rows] == [2, 1]
    assert rows[0].losses == pytest.approx(rows[1].losses, rel=1e-4), "the loss is the same on every layout"


def test_a_recipe_that_asks_for_ray_says_that_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("[train]", "[sweep.ray]\n[train]"))
    assert runnable_recipe(recipe, trust=False).sweep.ray == RaySettings()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(TrimaranError, match=r"^\[sweep.ray\] needs Ray, .*: pip install 'trimaran\[ray\]'$"):
        runnable_recipe(recipe, trust=False)


def test_a_signal_is_heard_while_an_actor_is_waited_for(on_ray: Recipe, two_nodes: Cluster, tmp_path: Path) -> None:
    """And neither after Ray's own wait nor as an error of Ray's."""

    class HeardError(BaseException):
        pass

    def hear(_number: int, _frame: object) -> None:
        raise HeardError

    launch = Launch(fake_worker("ok"), 1, tmp_path / "a folder that the actor waits for")
    before = signal.signal(signal.SIGUSR1, hear)
    try:
        with launcher_of(on_ray.sweep, two_nodes) as launcher:
            launcher.expect(1)
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(HeardError):
                launcher.start(launch)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_sigterm_while_ray_connects_is_heard_as_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray answers it there with a handler of its own, which leaves with status 15 and without a word."""

    class HeardError(BaseException):
        pass

    def hear(_number: int, _frame: object) -> None:
        raise HeardError

    def init(**_options: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    before = signal.signal(signal.SIGTERM, hear)
    try:
        with pytest.raises(HeardError):
            RayCluster(RaySettings(address="auto"))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_recipe_asks_for_slurm_or_for_ray() -> None:
    with pytest.raises(ValueError, match="slurm and ray both ask to start the ranks: drop one"):
        SweepSettings(slurm=SlurmSettings(), ray=RaySettings())


def test_a_node_of_gpus_is_asked_for_by_its_gpus(two_nodes: Cluster) -> None:
    assert bundle_of(two_nodes) == {"CPU": 2.0}
    assert bundle_of(load_cluster("dgx-h100")) == {"GPU": 8.0}


# The last one: no test of this file then has to wait for another raylet.
def test_a_node_that_dies_is_named_and_no_longer_counted(
    on_ray: Recipe, two_nodes: Cluster, tmp_path: Path, raylets: Raylets
) -> None:
    trial = prepare_trial(on_ray, two_nodes, parse_layout("dp4,mbs1"), data_dir=tmp_path, work_dir=tmp_path / "runs")

    def kill_second(steps: int) -> None:
        if steps == 2:
            raylets.kill_second()

    limits = Limits(timeout_s=60, start_s=30, hang_s=20, peers_s=1)  # the node is missed, not its ranks' signs
    with launcher_of(on_ray.sweep, two_nodes) as launcher:
        run = run_once(trial, launcher, limits, worker=fake_worker("meet"), on_step=kill_second)
        assert (run.row.status, run.node) == ("lost", "n2"), run.row.evidence
        assert (run.row.evidence or "").startswith("node n2 of rank 2, 3 does not answer (Ray at ")
        assert "rank 2: was on node n2, and nothing answers for it" in (run.row.evidence or "")
        assert launcher.nodes_left() == 1
