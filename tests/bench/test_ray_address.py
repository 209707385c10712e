"""An address at which no Ray listens is told at once, without Ray's own tries and log."""

from __future__ import annotations

import socket

import pytest

from trimaran.bench.launch.ray import ray_cluster
from trimaran.bench.launch.ray.ray_cluster import RayCluster
from trimaran.nouns.noun import TrimaranError
from trimaran.recipe.ray_settings import RaySettings


@pytest.mark.parametrize("written", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "[::1]:{port}", "nowhere.invalid:1"])
def test_an_address_without_a_listener_is_told_at_once(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "require_ray", lambda: None)
    with socket.socket() as bound:  # bound, and not listening: nobody else can take the port meanwhile
        bound.bind(("127.0.0.1", 0))
        address = written.format(port=bound.getsockname()[1])
        with pytest.raises(TrimaranError) as refused:
            RayCluster(RaySettings(address=address))
    assert f"no Ray answers at {address}" in str(refused.value) and "correct sweep.ray.address" in str(refused.value)


def test_what_is_to_be_corrected_is_what_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "require_ray", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", "nowhere.invalid:1")
    for stated, named_by in ((None, "RAY_ADDRESS"), ("elsewhere.invalid:1", "sweep.ray.address")):
        with pytest.raises(TrimaranError, match=rf"{stated or 'nowhere.invalid:1'} .*, or correct {named_by}$"):
            RayCluster(RaySettings(address=stated))
