"""A training on a real Slurm of two nodes lasts through a dozen faults of every kind that there is."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest
from virtual_cluster import killed_node

from many_faults import Engine, Later, assert_lasts, end_first, with_long_steps
from trimaran.bench.launch.slurm import slurm_ranks
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.recipe.recipe import Recipe
from trimaran.study.training import lasting, run


def watches_a_rank(process: int) -> bool:
    """Whether it is what sees a rank end on its node."""
    return b"node.py\0rank" in Path(f"/proc/{process}/cmdline").read_bytes()


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_a_training_on_two_nodes_lasts_through_a_dozen_faults(
    trainable: Recipe, cluster: Cluster, tmp_path: Path, slurm_conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is lost leaves a training on the other, which grows again when it is back."""
    monkeypatch.setattr(slurm_ranks, "_SEEN_WITHIN_S", 4.0)
    monkeypatch.setattr(run, "FAR_HANG_FLOOR_S", 6.0)
    monkeypatch.setattr(lasting, "NODES_EVERY_S", 1.0)
    two = cluster.model_copy(update={"nodes": 2, "devices_per_node": 1})
    slurm = SlurmSettings(time_limit_min=10, requeue=True)
    with contextlib.ExitStack() as away:

        def lose_node(for_s: float) -> None:
            away.close()  # one that was lost before is back
            dead = contextlib.ExitStack()
            dead.enter_context(killed_node(slurm_conf, "n2"))
            away.enter_context(Later(for_s, dead.close))

        on_slurm = Engine(
            trainable, two,
            trainable.sweep.model_copy(update={"slurm": slurm}), Layout(dp=2, mbs=8),
            end_parent=lambda: end_first(watches_a_rank), lose_node=lose_node,
        )  # fmt: skip
        kinds = Counter(kill=3, stop=2, slow=1, full_disk=2, lost_parent=2, lost_node=2)
        assert kinds.total() == 12
        on_slurm, undisturbed = with_long_steps(on_slurm, 180, tmp_path)
        assert_lasts(on_slurm, undisturbed, kinds, 180, tmp_path)
