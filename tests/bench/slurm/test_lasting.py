"""A training on a real Slurm goes on when one of its nodes dies."""

from __future__ import annotations

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

import pytest
from virtual_cluster import killed_node

from trimaran.bench.launch.slurm import slurm_ranks
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.protocol.files import RunFile
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.train_settings import TrainSettings
from trimaran.study.train_recipe import layout_on
from trimaran.study.training.run import run_training
from trimaran.study.workspace import Workspace

STEPS = 150


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("partition", "devices"), [("wide", 4), ("main", 2)], ids=["a spare", "what is left"])
def test_a_training_goes_on_when_a_node_dies(
    trainable: Recipe, two_nodes: Cluster, tmp_path: Path, slurm_conf: Path, monkeypatch: pytest.MonkeyPatch,
    partition: str, devices: int,
) -> None:  # fmt: skip
    """On the node that stands by, where there is one, or else on a layout for the nodes that are left."""
    monkeypatch.setattr(slurm_ranks, "_SEEN_WITHIN_S", 4.0)
    real = trainable.model_copy(
        update={
            "sweep": trainable.sweep.model_copy(
                update={"slurm": SlurmSettings(partition=partition, time_limit_min=10, requeue=True)}
            ),
            "train": TrainSettings(steps=STEPS, checkpoint_every=10, track=()),
        }
    )
    workspace, first = Workspace(tmp_path / "runs"), Layout(dp=4)
    with contextlib.ExitStack() as stack:
        dead: list[str] = []

        def power_off(line: dict[str, Any]) -> None:
            if line["iteration"] >= 30 and not dead:
                dead.append("n2")
                stack.enter_context(killed_node(slurm_conf, "n2"))

        row = run_training(
            real, two_nodes, first, data_dir=workspace.data(real), out_dir=workspace.training, on_step=power_off,
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
