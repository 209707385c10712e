"""A training on a real Ray of two raylets lasts through a dozen faults of every kind that there is."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest
from raylets import Raylets

from many_faults import Engine, Later, assert_lasts, end_first, with_long_steps
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.recipe.ray_settings import RaySettings
from trimaran.recipe.recipe import Recipe
from trimaran.study.training import lasting, run


def is_actor(process: int) -> bool:
    """Whether it is an actor that has a node's ranks."""
    return Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::RayNode")


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_a_training_on_two_raylets_lasts_through_a_dozen_faults(
    trainable: Recipe, settings: RaySettings, cluster: Cluster, tmp_path: Path, raylets: Raylets,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A raylet that is lost leaves a training on the other, which grows again when it is back."""
    monkeypatch.setattr(run, "FAR_HANG_FLOOR_S", 6.0)
    monkeypatch.setattr(lasting, "NODES_EVERY_S", 1.0)
    two = cluster.model_copy(update={"nodes": 2, "devices_per_node": 1})
    with contextlib.ExitStack() as away:

        def lose_node(for_s: float) -> None:
            away.close()  # one that was lost before is back
            raylets.kill_second()
            away.enter_context(Later(for_s, raylets.start_missing))

        on_ray = Engine(
            trainable, two,
            trainable.sweep.model_copy(update={"ray": settings}), Layout(dp=2, mbs=8),
            end_parent=lambda: end_first(is_actor), lose_node=lose_node,
        )  # fmt: skip
        kinds = Counter(kill=3, stop=2, slow=1, full_disk=2, lost_parent=2, lost_node=2)
        assert kinds.total() == 12
        on_ray, undisturbed = with_long_steps(on_ray, 180, tmp_path)
        assert_lasts(on_ray, undisturbed, kinds, 180, tmp_path)
