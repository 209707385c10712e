"""A training on a real Ray loses a raylet, and what its node held in memory with it, and goes on from a snapshot."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path

import pytest
from raylets import Raylets

from lasting_training import events_of
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.protocol.files import RunFile
from trimaran.recipe.ray_settings import RaySettings
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.train_settings import TrainSettings
from trimaran.study.training.run import run_training
from trimaran.study.workspace import Workspace

STEPS, SAVED_AT, LOST_AT = 90, 30, 60


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_a_lost_raylet_costs_the_steps_since_the_newest_snapshot(
    trainable: Recipe, settings: RaySettings, cluster: Cluster, tmp_path: Path, raylets: Raylets
) -> None:
    """Its node is lost with all that it held; the other's memory is newer than the newest checkpoint."""
    two = cluster.model_copy(update={"nodes": 2, "devices_per_node": 1})
    sweep = trainable.sweep.model_copy(update={"ray": settings})

    def train(folder: Path, *, lose: bool) -> tuple[list[dict[str, str]], list[float], list[str]]:
        train = TrainSettings(steps=STEPS, checkpoint_every=SAVED_AT, snapshot_seconds=1e-6, track=())
        real = trainable.model_copy(update={"sweep": sweep, "train": train})
        workspace, told, lost = Workspace(folder / "runs"), list[str](), list[int]()
        checkpoints = workspace.training.with_name("checkpoints").resolve()
        name = hashlib.sha256(str(checkpoints).encode()).hexdigest()[:16]
        held = Path("/dev/shm") / f"trimaran-held-{name}"

        def lose_second(line: dict[str, int]) -> None:
            if lose and not lost and line["iteration"] > SAVED_AT and _newest(held / "n1") > SAVED_AT + 3:
                lost.append(line["iteration"])
                raylets.kill_second()
                time.sleep(1.0)  # its ranks are gone with it
                shutil.rmtree(held / "n2", ignore_errors=True)
                raylets.start_missing()

        run_training(
            real, two, Layout(dp=2, zero_stage=1), data_dir=workspace.data(real), out_dir=workspace.training,
            on_step=lose_second, on_notice=told.append,
        )  # fmt: skip
        assert bool(lost) == lose and not held.exists()
        lines = [json.loads(line) for line in RunFile.LOG.of(workspace.training).read_text().splitlines()]
        return events_of(workspace), [line["lm_loss"] for line in lines], told

    _, expected, _ = train(tmp_path / "undisturbed", lose=False)
    events, losses, told = train(tmp_path / "disturbed", lose=True)
    kinds = [event["event"] for event in events]
    assert kinds[0] == "began" and kinds[1] == "lost" and kinds[-2:] == ["went_on", "finished"], told
    went_on_from = int(events[-2]["saved_step"])
    assert went_on_from > SAVED_AT and any("held in memory by" in text for text in told), told
    assert losses == expected


def _newest(folder: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)
