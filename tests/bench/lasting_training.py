"""A training on a launcher of several nodes that goes on when a node is taken away, and what is to be true of it."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Callable
from pathlib import Path

from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.protocol.files import RunFile
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.sweep_settings import SweepSettings
from trimaran.recipe.train_settings import TrainSettings
from trimaran.study.train_recipe import layout_on
from trimaran.study.training.run import run_training
from trimaran.study.workspace import Workspace

# Ranks that have grown fewer make enough steps for a node to come back meanwhile.
STEPS, LONG = 150, 400
TAKEN_AT = 30


def assert_goes_on(
    recipe: Recipe, cluster: Cluster, sweep: SweepSettings, folder: Path, take_n2: Callable[[], None], devices: int,
    give_back: Callable[[], None],
) -> None:  # fmt: skip
    """Train on four ranks of two nodes, take node n2 away on the way, and find all steps done.

    The training goes on with `devices`; where those are fewer, `give_back` has the node come back, and it grows again.
    """
    grows = devices < 4
    steps = LONG if grows else STEPS
    settings = TrainSettings(steps=steps, checkpoint_every=10, track=())
    real = recipe.model_copy(update={"sweep": sweep, "train": settings})
    workspace, first = Workspace(folder / "runs"), Layout(dp=4)
    taken: list[int] = []

    def take_once(line: dict[str, int]) -> None:
        if line["iteration"] >= TAKEN_AT and not taken:
            taken.append(line["iteration"])
            take_n2()
        elif len(taken) == 1 and grows and events_of(workspace)[-1]["event"] == "went_on":
            taken.append(line["iteration"])
            threading.Thread(target=give_back).start()

    row = run_training(
        real, cluster, first, data_dir=workspace.data(real), out_dir=workspace.training, on_step=take_once,
        layout_on=lambda count: layout_on(real, workspace, cluster, first, count),
    )  # fmt: skip
    assert row.status == "ok", row.evidence
    events = events_of(workspace)
    grown = ["grown", "went_on"] if grows else []
    assert [event["event"] for event in events] == ["began", "lost", "went_on", *grown, "finished"]
    assert events[1]["node"] == "n2" and "does not answer" in events[1]["why"]
    assert parse_layout(events[2]["layout"]).devices == devices
    assert parse_layout(events[-1]["layout"]).devices == 4
    log = [json.loads(line) for line in RunFile.LOG.of(workspace.training).read_text().splitlines()]
    assert [line["iteration"] for line in log] == list(range(1, steps + 1))


def events_of(workspace: Workspace) -> list[dict[str, str]]:
    """Rows of the training's events, checkpoints and ranks that other programs slow down left out."""
    with (workspace.folder / "events.csv").open(newline="") as file:
        return [event for event in csv.DictReader(file) if event["event"] not in ("saved", "slow")]
