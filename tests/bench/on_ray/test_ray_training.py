"""A training on a real Ray goes on when one of its raylets is killed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from raylets import Raylets

from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.protocol.files import RunFile
from trimaran.recipe.ray_settings import RaySettings
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.train_settings import TrainSettings
from trimaran.study.train_recipe import layout_on
from trimaran.study.training.run import run_training
from trimaran.study.workspace import Workspace

STEPS = 150


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("spare", "devices"), [(True, 4), (False, 2)], ids=["a spare", "what is left"])
def test_a_training_goes_on_when_a_raylet_is_killed(
    trainable: Recipe, settings: RaySettings, two_nodes: Cluster, tmp_path: Path, raylets: Raylets, spare: bool,
    devices: int,
) -> None:  # fmt: skip
    """On another node, where there is one, or else on a layout for the node that is left."""
    real = trainable.model_copy(
        update={
            "sweep": trainable.sweep.model_copy(update={"ray": settings}),
            "train": TrainSettings(steps=STEPS, checkpoint_every=10, track=()),
        }
    )
    workspace, first = Workspace(tmp_path / "runs"), Layout(dp=4)
    killed: list[int] = []

    def kill_second(line: dict[str, Any]) -> None:
        if line["iteration"] >= 30 and not killed:
            killed.append(line["iteration"])
            raylets.kill_second()
            if spare:
                raylets.start_missing()

    row = run_training(
        real, two_nodes, first, data_dir=workspace.data(real), out_dir=workspace.training, on_step=kill_second,
        layout_on=lambda count: layout_on(real, workspace, two_nodes, first, count),
    )  # fmt: skip
    assert row.status == "ok", row.evidence
    with (workspace.folder / "events.csv").open(newline="") as file:
        events = [event for event in csv.DictReader(file) if event["event"] not in ("saved", "slow")]
    assert [event["event"] for event in events] == ["began", "lost", "went_on", "finished"]
    assert events[1]["node"] == "n2" and "does not answer" in events[1]["why"]
    assert parse_layout(events[2]["layout"]).devices == devices
    log = [json.loads(line) for line in RunFile.LOG.of(workspace.training).read_text().splitlines()]
    assert [line["iteration"] for line in log] == list(range(1, STEPS + 1))
