"""A training on a real Ray goes on when one of its raylets is killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from raylets import Raylets

from lasting_training import assert_goes_on
from trimaran.nouns.cluster import Cluster
from trimaran.recipe.ray_settings import RaySettings
from trimaran.recipe.recipe import Recipe
from trimaran.study.training import lasting

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a node's memory")


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("spare", "devices"),
    [pytest.param(True, 4, id="a spare", marks=needs_mount), pytest.param(False, 2, id="what is left")],
)
def test_a_training_goes_on_when_a_raylet_is_killed(
    trainable: Recipe, settings: RaySettings, two_nodes: Cluster, tmp_path: Path, raylets: Raylets, spare: bool,
    devices: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On another node, where there is one, or else on a layout for the node that is left, until it is back.

    The other node has nothing of the snapshots in memory.
    """
    monkeypatch.setattr(lasting, "NODES_EVERY_S", 0.5)

    def kill_second() -> None:
        raylets.kill_second()
        if spare:
            raylets.start_missing(own_memory=True)

    sweep = trainable.sweep.model_copy(update={"ray": settings})
    try:
        if spare:
            kill_second()
        assert_goes_on(trainable, two_nodes, sweep, tmp_path, kill_second, devices, raylets.start_missing)
    finally:
        if spare:
            raylets.kill_second()  # the next test's node has this machine's memory
