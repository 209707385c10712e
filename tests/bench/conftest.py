"""A small recipe, a small cluster, and a worker that misbehaves on request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trial_helpers import LIMITS, fake_worker
from trimaran.bench.launch.local import LocalLauncher
from trimaran.bench.trial.trial import prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.model import Model
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.sweep_settings import SweepSettings


@pytest.fixture
def cluster() -> Cluster:
    link = Link(bandwidth_gbps=10, latency_us=10)
    device = Device(
        name="a core", kind="cpu", peak_tflops={"fp32": 0.1}, mem_gib=4, mem_bandwidth_gb_s=10, cores=1
    )  # fmt: skip
    return Cluster(name="here", device=device, nodes=1, devices_per_node=4, intra=link, inter=link, cores_per_node=2)


@pytest.fixture
def recipe() -> Recipe:
    model = Model(layers=4, hidden=64, heads=4, vocab=256, max_positions=64)
    stack = Stack(name="trimaran", framework="trimaran", uneven_stages=True, head_weighted_stages=True)
    workload = Workload(model=model, seq_len=32, global_batch=8)
    return Recipe(name="tiny", workload=workload, stack=stack, sweep=SweepSettings(steps=6, warmup_steps=2))


@pytest.fixture
def trainable(recipe: Recipe, tmp_path: Path) -> Recipe:
    """The recipe with a text that it can really be trained on."""
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 2000)
    model = recipe.workload.model.model_copy(update={"vocab": 384})
    workload = recipe.workload.model_copy(update={"model": model})
    data = DataSettings(paths=(str(text),), tokenizer="bytes")
    return recipe.model_copy(update={"data": data, "workload": workload})


@pytest.fixture
def run_fake(recipe: Recipe, cluster: Cluster, tmp_path: Path) -> Callable[..., Measurement]:
    """Run one trial of the fake worker: run_fake("hang", "dp2,mbs1", hang_s=1)."""

    def run(behaviour: str, layout: str = "dp2,mbs1", **limits: float) -> Measurement:
        trial = prepare_trial(recipe, cluster, parse_layout(layout), data_dir=tmp_path, work_dir=tmp_path / "runs")
        return run_trial(
            trial,
            LocalLauncher(),
            Limits(**{**vars(LIMITS), **limits}),
            worker=fake_worker(behaviour),
        )

    return run
