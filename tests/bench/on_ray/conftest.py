"""A real Ray of two raylets on this machine, for the tests of the folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from raylets import Raylets

from trial_helpers import processes_that_name
from trimaran.nouns.cluster import Cluster
from trimaran.recipe.ray_settings import RaySettings
from trimaran.recipe.recipe import Recipe


@pytest.fixture(scope="session")
def raylets() -> Iterator[Raylets]:
    started = Raylets()
    yield started
    started.close()


@pytest.fixture
def two_nodes(cluster: Cluster) -> Cluster:
    return cluster.model_copy(update={"nodes": 2, "devices_per_node": 2})


@pytest.fixture
def settings(raylets: Raylets, tmp_path: Path) -> Iterator[RaySettings]:
    """Both raylets up, and after the test nothing of it left on them."""
    raylets.start_missing()
    yield RaySettings(address=raylets.address, wait_min=0.5)
    deadline = time.monotonic() + 10
    while (left := processes_that_name(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.fixture
def on_ray(recipe: Recipe, settings: RaySettings) -> Recipe:
    return recipe.model_copy(update={"sweep": recipe.sweep.model_copy(update={"ray": settings})})


@pytest.fixture(autouse=True)
def no_other_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_ADDRESS")]:
        monkeypatch.delenv(name)
