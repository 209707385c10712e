"""A real Slurm for the tests of the folder. Where root has not installed one the tests fail, and say how to get it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from virtual_cluster import missing, virtual_cluster

from trimaran.nouns.cluster import Cluster


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
