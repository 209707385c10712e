"""A training on a real Slurm goes on when one of its nodes dies."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from virtual_cluster import killed_node, nodes_with_own_memory

from lasting_training import assert_goes_on
from trimaran.bench.launch.slurm import slurm_ranks
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.recipe.recipe import Recipe
from trimaran.study.training import lasting


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("partition", "devices"), [("wide", 4), ("main", 2)], ids=["a spare", "what is left"])
def test_a_training_goes_on_when_a_node_dies(
    trainable: Recipe, two_nodes: Cluster, tmp_path: Path, slurm_conf: Path, monkeypatch: pytest.MonkeyPatch,
    partition: str, devices: int,
) -> None:  # fmt: skip
    """On the node that stands by, where there is one, or else on a layout for those that are left, until it is back.

    The node that stands by has nothing of the snapshots in memory.
    """
    monkeypatch.setattr(slurm_ranks, "_SEEN_WITHIN_S", 4.0)
    monkeypatch.setattr(lasting, "NODES_EVERY_S", 0.5)
    slurm = SlurmSettings(partition=partition, time_limit_min=10, requeue=True)
    sweep = trainable.sweep.model_copy(update={"slurm": slurm})
    own_memory = nodes_with_own_memory(slurm_conf, "n2", "n3") if devices == 4 else contextlib.nullcontext()
    with own_memory, contextlib.ExitStack() as dead:

        def power_off() -> None:
            dead.enter_context(killed_node(slurm_conf, "n2"))

        assert_goes_on(trainable, two_nodes, sweep, tmp_path, power_off, devices, dead.close)
