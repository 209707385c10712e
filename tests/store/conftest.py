"""A trial of a Llama of its own, and the row that the harness makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from store_rows import LAYOUT, WORKLOAD
from trimaran.bench.trial.trial import UNSTORED, Trial, finished_before, prepare_trial
from trimaran.files.catalogue import dump_toml, load_cluster, load_stack
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.sweep_settings import SweepSettings


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A node of eight devices, kept as a file in the folder `cluster`."""
    named = load_cluster("a100-8x-node").model_copy(update={"name": "here"})
    dump_toml(named, tmp_path / "here.toml")
    return named


@pytest.fixture
def trial(tmp_path: Path, cluster: Cluster) -> Trial:
    recipe = Recipe(
        name="llama", workload=WORKLOAD, stack=load_stack("trimaran"), sweep=SweepSettings(steps=6, warmup_steps=2)
    )
    return prepare_trial(recipe, cluster, LAYOUT, data_dir=tmp_path, work_dir=tmp_path / "runs")


@pytest.fixture
def row(trial: Trial) -> Measurement:
    """The row that the harness makes of the files that the ranks of the trial leave."""
    folder = Path(trial.job.out_dir)
    folder.mkdir(parents=True)
    (folder / UNSTORED).touch()
    (folder / "job.json").write_text(trial.job.model_dump_json(indent=1))
    times = [0.9, 0.5, 0.2, 0.21, 0.19, 0.2]
    result = {"steps": 6, "sec_per_it": times, "losses": [5.0] * 6, "mem_gib_per_rank": [1.0] * 8}
    (folder / "result.json").write_text(json.dumps(result))
    made = finished_before(trial)
    assert made is not None
    return made
