"""A recipe is checked whole before anything runs: every field, and fields against each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimaran.files.recipe_file import load_recipe
from trimaran.nouns.noun import TrimaranError

RECIPE = """
name = "study"
[model]
layers = 2
hidden = 32
heads = 2
vocab = 257
[workload]
seq_len = 32
global_batch = 4
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[sweep]\nmin_trials = 9\nmax_trials = 4", "min_trials 9 exceeds max_trials 4"),
        ("[sweep]\nsteps = 3\nwarmup_steps = 3", "warmup_steps 3 leaves none of steps 3"),
        ("[sweep]\ndevices = [2, 0]", "sweep.devices.1"),
        ("[sweep]\ntimeout_s = 1e30", "sweep.timeout_s"),
        ("[sweep]\nsteps = 1000000000000", "sweep.steps"),
        ('[sweep]\nfixed = {tp = "two"}', "sweep: fixed.tp: Input should be a valid integer"),
        ("[sweep]\nfixed = {mbs = [1, 2]}", "sweep.fixed.mbs: a whole number, a text, true or false is expected"),
        ("[sweep]\nfixed = {mbs = 0}", "sweep: fixed.mbs: Input should be greater than 0"),
        ("[train]\nlearning_rate = 1e-4\nmin_learning_rate = 1e-3", "min_learning_rate 0.001 exceeds learning_rate"),
        ("[train]\nbalance_loss = 0.01", "train.balance_loss is 0.01, but model.experts is 0"),
        ("[train]\nrouter_bias_rate = 0.01", "train.router_bias_rate is 0.01, but the routers have no biases"),
        ("[data]\npaths = []", "data: paths is empty: name at least one file"),
        ("[train]\nseed = -1", "train.seed"),
        ("[train]\nseed = 99999999999999999999", "train.seed"),
        ("[train]\nlearning_rte = 1", "learning_rte"),
        ("[trian]\nsteps = 1", "'trian'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f"{RECIPE}{text}\n")
    with pytest.raises(TrimaranError) as caught:
        load_recipe(str(path))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "../elsewhere", "/abs", "a/b", ".hidden", "a\\u0000b", "x" * 200])
def test_a_study_has_the_name_of_a_folder(tmp_path: Path, name: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("study", name))
    with pytest.raises(TrimaranError, match="name: a study's folder has this name"):
        load_recipe(str(path))


@pytest.mark.parametrize("line", ["cluster = 5", "cluster = []", "stack = 5", "sweep = 1", "train = []", 'data = "x"'])
def test_a_part_of_the_wrong_kind_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f"{line}\n{RECIPE}")
    with pytest.raises(TrimaranError, match=line.split(maxsplit=1)[0]):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama3-405b", "'llama3-405b' is a model and no recipe: .* --model llama3-405b"),
        ("bloom-17", "recipe 'bloom-17' is not in the catalogue: did you mean 'bloom-176b'"),
        ("nothing-like-it", "it has .*bloom-176b, .*laptop-moe"),
        ("missing.toml", "recipe missing.toml cannot be read: No such file"),
    ],
)
def test_a_name_that_is_no_recipe_is_told_what_it_may_be(name: str, says: str) -> None:
    with pytest.raises(TrimaranError, match=says) as caught:
        load_recipe(name)
    assert "\n" not in str(caught.value)
