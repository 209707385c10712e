"""A real Slurm for the tests of the folder. Where root has not installed one the tests fail, and say how to get it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from on_slurm import LIMITS, Run, squeue
from virtual_cluster import missing, virtual_cluster, wait_for_idle_nodes

from trial_helpers import fake_worker, processes_that_name
from trimaran.bench.launchers import launcher_of
from trimaran.bench.trial.trial import prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.recipe.recipe import Recipe


@pytest.fixture(scope="session")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("a Slurm of this machine's own needs root")
    if lacks := missing():
        pytest.fail(
            f"a Slurm of this machine's own needs {', '.join(lacks)}: apt-get install slurm-wlm munge, or leave these "
            f"tests out with pytest --ignore=tests/bench/slurm (see CONTRIBUTING.md)"
        )
    with virtual_cluster(tmp_path_factory.mktemp("slurm")) as conf:
        yield conf


@pytest.fixture(autouse=True)
def in_slurm(slurm_conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands speak to the virtual cluster, as from a login node."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(slurm_conf))


@pytest.fixture
def two_nodes(cluster: Cluster) -> Cluster:
    return cluster.model_copy(update={"nodes": 2, "devices_per_node": 2})


@pytest.fixture(autouse=True)
def nothing_is_left(in_slurm: None, slurm_conf: Path, tmp_path: Path) -> Iterator[None]:
    """No job and no process of a test outlives it; one that does is the next one's no more, which has every node."""
    yield
    deadline = time.monotonic() + 20
    while (squeue() or processes_that_name(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = squeue()
    if left:
        subprocess.run(["scancel", *(line.split()[0] for line in left)], check=True)
    wait_for_idle_nodes(slurm_conf)
    assert left == []
    assert processes_that_name(str(tmp_path)) == []


@pytest.fixture
def run_on_slurm(recipe: Recipe, two_nodes: Cluster, tmp_path: Path) -> Run:
    """One trial of the fake worker on four ranks of two nodes."""

    def run(behaviour: str, submit: str = "allocation", layout: str = "dp4,mbs1", **limits: float) -> Measurement:
        trial = prepare_trial(recipe, two_nodes, parse_layout(layout), data_dir=tmp_path, work_dir=tmp_path / "runs")
        sweep = recipe.sweep.model_copy(update={"slurm": SlurmSettings(submit=submit)})
        with launcher_of(sweep, two_nodes) as launcher:
            return run_trial(trial, launcher, Limits(**{**vars(LIMITS), **limits}), worker=fake_worker(behaviour))

    return run
