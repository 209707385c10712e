"""Every path in a recipe is taken from the recipe's folder, wherever the command is given and the ranks start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from command import MACHINE, TRIMARAN, run, tiny_recipe
from trimaran.files.recipe_file import load_recipe

PATHS = """
stack = "./stack.toml"
cluster = "machines/m.toml"
[model]
name = "./model.toml"
[workload]
seq_len = 32
global_batch = 4
[data]
tokenizer = "tokens/tokenizer.json"
[[data.blend]]
paths = ["web", "~/more.txt", "/all/of/it.txt", "python-stdlib"]
weight = 1.0
[[data.blend]]
paths = ["code.bin"]
weight = 1.0
[train]
init_from = "weights"
"""


def test_every_path_is_taken_from_the_recipes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "study", tmp_path / "elsewhere"
    (folder / "machines").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "machines" / "m.toml").write_text(MACHINE)
    (folder / "model.toml").write_text("layers = 2\nhidden = 32\nheads = 2\nvocab = 257\n")
    (folder / "stack.toml").write_text('framework = "trimaran"\n')
    (folder / "r.toml").write_text(PATHS)
    # what lies where the command is given is not meant
    (elsewhere / "model.toml").write_text("layers = 9\nhidden = 32\nheads = 2\nvocab = 257\n")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", "/home/me")
    for name in (str(folder / "r.toml"), "../study/r.toml"):
        recipe = load_recipe(name)
        assert recipe.workload.model.layers == 2 and recipe.cluster is not None and recipe.cluster.devices_per_node == 2
        given = [path for text in recipe.data.texts for path in text.paths]
        assert [Path(path).is_absolute() for path in given] == [True, True, True, False, True]
        here = [
            Path(path).resolve()
            for path in (*given[:1], *given[4:], recipe.data.tokenizer, recipe.train.init_from or "")
        ]
        assert here == [folder / name for name in ("web", "code.bin", "tokens/tokenizer.json", "weights")]
        assert given[1:4] == ["/home/me/more.txt", "/all/of/it.txt", "python-stdlib"]


def test_words_that_are_no_paths_stay(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, data='tokenizer = "bpe"')
    assert (load_recipe(str(recipe)).data.tokenizer, load_recipe(str(recipe)).data.paths) == ("bpe", ("python-stdlib",))


def test_a_home_that_is_not_there_is_told(tmp_path: Path) -> None:
    """Of a user whom nobody knows, or of this one in a container that does not know it: it was a traceback."""
    recipe = tiny_recipe(tmp_path, data='paths = ["~nobody-of-this-name/text"]')
    for words in (
        ("plan", str(recipe)),
        ("sample", "~nobody-of-this-name/x"),
        ("convert", "~nobody-of-this-name/x", "-o", "y"),
    ):
        told = run(*words, cwd=tmp_path).stderr.strip().splitlines()
        assert len(told) == 1 and "~nobody-of-this-name has no home directory here: write the whole path" in told[0], (
            told
        )


@pytest.mark.proof
def test_a_study_may_lie_in_a_folder_of_any_name(tmp_path: Path) -> None:
    """An end of a line in it had the text looked for in another folder; here in the plainest of all locales, too."""
    folder = "ends\nof lines, spaces, a:b,c%d=e, ünïcode"
    plain = {name: value for name, value in os.environ.items() if name != "HOME"} | {"LC_ALL": "C", "LANG": "C"}
    command = [TRIMARAN, "bench", str(tiny_recipe(tmp_path)), "--runs", folder]
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / folder).iterdir()) == ["tiny"]


@pytest.mark.proof
def test_a_training_begins_with_weights_beside_its_recipe(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "study", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    recipe = tiny_recipe(folder)
    train = ("train", str(recipe), "--layout", "dp1,mbs4", "--runs", str(folder / "runs"))
    recipe.write_text(recipe.read_text().replace("steps = 12\n", "steps = 2\n"))
    first = run(*train, cwd=elsewhere)
    assert first.returncode == 0, first.stderr
    text = recipe.read_text().replace('name = "tiny"', 'name = "second"')
    recipe.write_text(text + 'init_from = "runs/tiny"\n')
    second = run(*train, cwd=elsewhere)
    assert second.returncode == 0, second.stderr
