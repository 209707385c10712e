"""A recipe that is trained again: what is there is kept, gone on from or left as it is, and what changes is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import run, tiny_recipe


@pytest.mark.proof
def test_a_new_training_keeps_the_checkpoints_of_the_one_before(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    train = ["train", str(recipe), "--layout", "dp1,mbs4"]
    assert run(*train, cwd=tmp_path).returncode == 0
    again = run(*train, cwd=tmp_path)
    assert "checkpoints of an earlier training are kept in runs/tiny/checkpoints-1" in again.stderr
    assert (tmp_path / "runs/tiny/checkpoints-1/step-00000012/manifest.json").exists()

    recipe.write_text(recipe.read_text().replace("steps = 12", "steps = 20\ncheckpoint_every = 0"))
    unsaved = run(*train, "--resume", cwd=tmp_path)
    assert unsaved.returncode == 0 and "going on from step 12 of" in unsaved.stderr, unsaved.stderr
    assert [entry.name for entry in (tmp_path / "runs/tiny/checkpoints").iterdir()] == ["step-00000012"]

    recipe.write_text(recipe.read_text().replace("hidden = 32", "hidden = 64"))
    refused = run(*train, "--resume", cwd=tmp_path)
    assert refused.returncode == 2
    assert "workload.model.hidden is 64, the checkpoint has 32" in refused.stderr


@pytest.mark.proof
def test_a_finished_training_stays_as_it_is_and_more_steps_tell_of_the_rate_they_raise(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    train = ["train", str(recipe), "--layout", "dp1,mbs4", "--resume"]
    result = tmp_path / "runs/tiny/train/result.json"
    assert run(*train, cwd=tmp_path).returncode == 0
    first = result.read_bytes()

    again = run(*train, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "all 12 steps were made before" in again.stderr and again.stdout.startswith("12 steps with dp1")
    assert result.read_bytes() == first and not (tmp_path / "runs/tiny/train-1").exists()

    result.unlink()  # as by a kill between the last checkpoint and the result
    ended = run(*train, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for figure in ("sec_per_it", "losses", "grad_norms"):
        assert json.loads(result.read_text())[figure] == json.loads(first)[figure]

    recipe.write_text(recipe.read_text().replace("steps = 12", "steps = 24"))
    more = run(*train, cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    log = [json.loads(line) for line in (result.parent / "log.jsonl").read_text().splitlines()]
    rate = log[12]["learning_rate"]
    told = next(line for line in more.stderr.splitlines() if "learning rate" in line)
    assert f"the next step's learning rate is {rate:.4g} instead of 0.0001" in told
    assert "train.decay_steps = 12 keeps it" in told
