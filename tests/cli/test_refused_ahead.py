"""What a training would refuse is refused before the first trial of the tuning that leads to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import run, tiny_recipe

OTHER_MODEL = {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 257, "n_positions": 32}


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ("validation = 0.05\neval_every = 5\neval_steps = 5000", "train.eval_steps 5000"),
        ('track = ["wandb"]', "wandb, which is not installed"),
        ('init_from = "weights"', "the weights in"),
    ],
)
def test_it_is_refused_before_the_first_trial(tmp_path: Path, train: str, says: str) -> None:
    recipe = tiny_recipe(tmp_path)
    # weights of another model, beside the recipe
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(OTHER_MODEL))
    (tmp_path / "weights" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    (tmp_path / "elsewhere").mkdir()
    recipe.write_text(f"{recipe.read_text()}{train}\n")
    done = run("tune", str(recipe), cwd=tmp_path / "elsewhere")
    assert done.returncode == 2 and says in done.stderr.splitlines()[-1], done.stderr
    assert "trial 1" not in done.stderr
    assert not (tmp_path / "elsewhere" / "runs" / "tiny" / "trials").exists()
