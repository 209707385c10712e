"""A training on a launcher of several nodes that goes on when a node is taken away, and what is to be true of it."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

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

# A training that is to grow again ends with that: a node may take long to come back, and its steps are not waited for.
STEPS, MANY = 150, 4000
TAKEN_AT = 30


class GrownError(Exception):
    """The training has made steps on as many devices as in the beginning."""


def assert_goes_on(
    recipe: Recipe, cluster: Cluster, sweep: SweepSettings, folder: Path, take_n2: Callable[[], None], devices: int,
    give_back: Callable[[], None],
) -> None:  # fmt: skip
    """Train on four ranks of two nodes, take node n2 away on the way, and find that the training goes on.

    It goes on with `devices`. Where those are all four, it goes on from what n1 holds in memory, and makes all of its
    steps: n2, and what takes its place, are to have memory of their own. Where they are fewer, it goes on from a
    checkpoint, `give_back` has the node come back, and it grows again. On a machine that is busy more faults may strike
    meanwhile, as where a node that has just come back is too slow to start ranks: what is promised comes in its order
    all the same.
    """
    grows = devices < 4
    steps = MANY if grows else STEPS
    saved = {"checkpoint_every": 10} if grows else {"checkpoint_every": STEPS, "snapshot_seconds": 1e-6}
    settings = TrainSettings.model_validate({"steps": steps, "track": (), **saved})
    real = recipe.model_copy(update={"sweep": sweep, "train": settings})
    workspace, first = Workspace(folder / "runs"), Layout(dp=4)
    taken, told = list[int](), list[str]()
    giving_back = threading.Thread(target=give_back)

    def take_once(line: dict[str, int]) -> None:
        held = any("is held in memory" in text for text in told)
        if line["iteration"] >= TAKEN_AT and not taken and (held or grows):
            taken.append(line["iteration"])
            take_n2()
        elif taken and grows and (on := _goes_on_with(workspace)) is not None:
            if on == 4:
                raise GrownError
            if giving_back.ident is None:
                giving_back.start()

    with pytest.raises(GrownError) if grows else contextlib.nullcontext():
        row = run_training(
            real, cluster, first, data_dir=workspace.data(real), out_dir=workspace.training, on_step=take_once,
            on_notice=told.append, layout_on=lambda count: layout_on(real, workspace, cluster, first, count),
        )  # fmt: skip
        assert row.status == "ok", row.evidence
    if grows:
        giving_back.join()
    events = events_of(workspace)
    course = [(event["event"], parse_layout(event["layout"]).devices) for event in events]
    end = [("grown", devices), ("went_on", 4)] if grows else [("finished", 4)]
    promised = [("began", 4), ("first_step", 4), ("lost", 4), ("went_on", devices), *end]
    coming = iter(course)
    assert all(event in coming for event in promised), events
    lost = next(event for event in events if event["event"] == "lost")
    assert lost["node"] == "n2" and "does not answer" in lost["why"], events
    if not grows:
        written = re.search(r"snapshot of step (\d+), held in memory by n1, is written", "\n".join(told))
        assert lost["saved_step"] == "0" and written, told
        assert int(written[1]) >= int(lost["step"]) - int(lost["lost_steps"]) > 0, events
    log = [json.loads(line)["iteration"] for line in RunFile.LOG.of(workspace.training).read_text().splitlines()]
    assert log == list(range(1, len(log) + 1)) and (grows or len(log) == steps), events


def _goes_on_with(workspace: Workspace) -> int | None:
    """On how many devices, where the ranks' first step after a fault, or on more devices, was noted last."""
    newest = events_of(workspace)[-1]
    return parse_layout(newest["layout"]).devices if newest["event"] == "went_on" else None


def events_of(workspace: Workspace) -> list[dict[str, str]]:
    """Rows of the training's events, those of checkpoints and of ranks that other programs slow down left out."""
    with (workspace.folder / "events.csv").open(newline="") as file:
        return [event for event in csv.DictReader(file) if event["event"] not in ("saved", "not_saved", "slow")]
