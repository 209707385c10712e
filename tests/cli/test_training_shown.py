"""What people look at during and after a training: event files, traces, memory in its parts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from command import run, tiny_recipe
from trimaran.cli.live_progress import TrainingProgress, readable
from trimaran.files.recipe_file import load_recipe
from trimaran.files.row_nouns import run_cells
from trimaran.layout.notation import parse_layout
from trimaran.nouns.measurement import Measurement
from trimaran.store import Store


@pytest.mark.proof
def test_a_training_leaves_event_files_traces_and_memory_by_its_parts(tmp_path: Path) -> None:
    done = run("train", str(tiny_recipe(tmp_path)), "--layout", "dp2,mbs2", "--trace", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/tiny/train"

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    shown = [event.value for event in events.Scalars("lm_loss")]
    logged = [json.loads(line)["lm_loss"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert shown == pytest.approx(logged, rel=1e-6) and len(shown) == 12
    assert {"learning_rate", "tokens_per_s", "grad_norm", "peak_mem_gib"} <= set(events.Tags()["scalars"])

    for rank in range(2):
        trace = json.loads((folder / f"trace.{rank}.json").read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        # two steps of two layers, forward
        assert sum(name.removeprefix("aten::") == "scaled_dot_product_attention" for name in names) == 4

        memory = json.loads((folder / f"memory.{rank}.json").read_text())
        parts = ("weights", "gradients", "optimizer", "context", "rest")
        assert sum(memory[part] for part in parts) == pytest.approx(memory["peak"])
        # fp32 weights and gradients, two moments
        assert memory["gradients"] == memory["weights"] == pytest.approx(memory["optimizer"] / 2, rel=0.01)
    for part in ("weights", "gradients", "optimizer", "peak"):
        assert f"    {part} " in done.stdout


def test_a_tracker_that_is_not_installed_is_told_before_the_first_step(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("[train]", '[train]\ntrack = ["mlflow"]'))
    done = run("train", str(recipe), "--layout", "dp1,mbs4", cwd=tmp_path)
    assert done.returncode == 2 and "train.track names mlflow, which is not installed" in done.stderr


def test_progress_tells_perplexity_and_the_time_left_by_the_usual_step(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainingProgress(steps=100_000)
    for step in range(1, 21):
        line = {"iteration": step, "lm_loss": 2.5, "sec_per_it": 600.0 if step == 20 else 2.0}
        progress(line | ({"validation_loss": 2.25, "validation_perplexity": 9.4877} if step == 20 else {}))
    first, _, last = capsys.readouterr().err.splitlines()
    assert first == "step 1 of 100000: loss 2.5000, 2.000 s/it, about 2 d 08 h left"
    assert last == (
        "step 20 of 100000: loss 2.5000, validation 2.2500 (perplexity 9.488), 2.000 s/it, about 2 d 08 h left"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (99, "99 s"), (100, "2 min"), (5940, "99 min"), (6000, "1 h 40 min"), (170_000, "47 h 13 min"),
     (172_800, "2 d 00 h"), (175_000, "2 d 01 h")],
)  # fmt: skip
def test_times_are_told_as_one_says_them(seconds: float, text: str) -> None:
    assert readable(seconds) == text


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """A busy program for each of two cores, for as long as the test runs."""
    burn = "import time\nend = time.monotonic() + 100\nwhile time.monotonic() < end: pass\n"
    burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(2)]
    yield
    for burner in burners:
        burner.kill()
        burner.wait()


@pytest.mark.proof
@pytest.mark.usefixtures("busy_cores")
def test_a_training_slower_than_its_trial_names_what_other_programs_took(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    stated = load_recipe(str(recipe))
    assert stated.cluster is not None
    machine = {"hardware": stated.cluster.device.name, "devices": 1, "devices_per_node": 1}
    cells = run_cells(stated.workload, parse_layout("dp1,mbs4"))
    trial = {**cells, **machine, "sec_per_it": 1e-5, "others_share": 0.01, "recipe": "tiny"}
    with Store(tmp_path / "runs/tiny/store.sqlite") as store:
        store.add(Measurement.model_validate(trial))
    done = run("train", str(recipe), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = re.search(r"measured 0.000 s/it before, so .* times as long: other programs took (\d+)% of", done.stdout)
    assert told and int(told[1]) > 20, done.stdout
    assert "and 1% while it was measured" in done.stdout and "not why" not in done.stdout
