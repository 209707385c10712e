"""What a training would refuse is refused before the first trial of the tuning that leads to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from command import TRIMARAN, run, tiny_recipe

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
    (tmp_path / "weights" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"wte.weight": "a.safetensors"}}'
    )
    (tmp_path / "weights" / "a.safetensors").touch()
    (tmp_path / "elsewhere").mkdir()
    recipe.write_text(f"{recipe.read_text()}{train}\n")
    done = run("tune", str(recipe), cwd=tmp_path / "elsewhere")
    assert done.returncode == 2 and says in done.stderr.splitlines()[-1], done.stderr
    assert "trial 1" not in done.stderr
    assert not (tmp_path / "elsewhere" / "runs" / "tiny" / "trials").exists()


def test_weights_that_are_not_there_are_refused_before_the_first_trial(tmp_path: Path) -> None:
    """Each trial was refused by its ranks, one after the other, and the store had a row `fail` of each."""
    recipe = tiny_recipe(tmp_path, ["dp1,mbs4", "dp1,mbs2"])
    recipe.write_text(f'{recipe.read_text()}init_from = "weights"\n')
    done = run("bench", str(recipe), cwd=tmp_path)
    assert done.returncode == 2 and "weights does not exist: name a checkpoint" in done.stderr.splitlines()[-1]
    assert "trial 1" not in done.stderr and not (tmp_path / "runs/tiny/trials").exists()


def test_a_training_that_goes_on_is_refused_before_any_rank(tmp_path: Path) -> None:
    """Its ranks refused it, half a minute later, which `trimaran report` counted as a fault of the training."""
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(f"{recipe.read_text()}validation = 0.05\neval_every = 5\neval_steps = 5000\n")
    done = run("train", str(recipe), "--layout", "dp1,mbs4", "--resume", cwd=tmp_path)
    assert done.returncode == 2 and "train.eval_steps 5000" in done.stderr.splitlines()[-1], done.stderr
    assert "rank 0" not in done.stderr and not (tmp_path / "runs/tiny/train").exists()


@pytest.mark.proof
def test_text_that_is_less_than_a_sample_is_refused_before_any_rank(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    whole = recipe.read_text()
    (tmp_path / "short.txt").write_text("too little to learn from")
    tries = {
        whole.replace("text.txt", "short.txt"): "25 tokens are fewer than the 33 of one sample",
        whole.replace("vocab = 257", "vocab = 100"): "model.vocab is 100: raise model.vocab",
    }
    done = run("data", str(recipe), cwd=tmp_path)  # a text that is there already counts by the model as well
    assert done.returncode == 0
    for text, says in tries.items():
        recipe.write_text(text)
        for verb in (("tune", str(recipe)), ("train", str(recipe), "--layout", "dp1,mbs4")):
            done = run(*verb, cwd=tmp_path)
            assert done.returncode == 2 and says in done.stderr.splitlines()[-1], done.stderr
            assert "rank 0" not in done.stderr and not (tmp_path / "runs" / "tiny" / "trials").exists()


@pytest.mark.proof
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is at hand")
def test_a_cluster_of_gpus_is_refused_where_there_are_none(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace('"machine.toml"', '"dgx-h100"'))
    for verb in (("tune",), ("bench",), ("train", "--layout", "dp1,mbs4")):
        done = run(verb[0], str(recipe), *verb[1:], cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "cluster dgx-h100 is of GPUs, and PyTorch finds none on this machine" in done.stderr.splitlines()[-1]
        assert "trial 1" not in done.stderr and not (tmp_path / "runs" / "tiny" / "trials").exists()


STRETCHED = {
    "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 257,
    "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("verb", [("train", "--layout", "dp1,mbs4"), ("tune",)])
def test_a_trait_that_the_trainer_lacks_is_refused_before_any_rank(tmp_path: Path, verb: tuple[str, ...]) -> None:
    recipe = tiny_recipe(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(STRETCHED))
    before, rest = recipe.read_text().split("[model]\n")
    rest = rest[rest.index("\n[") :]
    recipe.write_text(f'{before}[model]\nname = "./config.json"\n{rest}')
    done = run(verb[0], str(recipe), *verb[1:], cwd=tmp_path)
    assert done.returncode == 2 and "model.rotary_stretch is dynamic, and trimaran trains no such model" in done.stderr
    assert not list(tmp_path.glob("runs/**/*.json")) and len(done.stderr.splitlines()) == 1


NOT_TRAINED = "model.rotary_stretch is yarn, and trimaran trains no such model"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("train", "tiny.toml", "--layout", "dp1,mbs4"), NOT_TRAINED),
        (("tune", "tiny.toml"), NOT_TRAINED),
    ],
    ids=str,
)
def test_no_verb_that_runs_takes_angles_of_yarn_without_its_numbers(
    tmp_path: Path, command: tuple[str, ...], says: str
) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("[model]\n", '[model]\nrotary_stretch = "yarn"\n'))
    done = run(*command, cwd=tmp_path)
    assert done.returncode != 0 and says in done.stderr + done.stdout
    assert not (tmp_path / "runs").exists()


def test_a_training_that_cannot_find_room_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("layers = 2\nhidden = 32", "layers = 24\nhidden = 4096"))
    done = run("train", str(recipe), "--layout", "dp2,mbs2", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    for said in (
        "layout dp2,tp1,pp1,mbs2",
        "predicted to hold",
        "host_mem_gib is 8.0 GiB",
        "fsdp",
        "recompute-full",
        "mbs 2",
    ):
        assert said in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("predict", "seeds"),
        ("fit", "seeds"),
        ("report", "seeds"),
        ("export", "--model", "gpt2-124m", "--cluster", "dgx-h100", "--gbs", "8", "--devices", "8", "--to", "megatron"),
        ("timeline", "tiny.toml"),
        ("probe",),
    ],
    ids=lambda command: command[0],
)
def test_a_file_that_cannot_be_written_is_told_of_before_the_work(tmp_path: Path, command: tuple[str, ...]) -> None:
    tiny_recipe(tmp_path)
    (tmp_path / "taken.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "full.csv").write_text("kept")
    tries = {"taken.csv": "is a folder", "pipe.csv": "is a pipe or a device", "full.csv/out.csv": "can be written into"}
    for name, says in tries.items():
        done = run(*command, "-o", name, cwd=tmp_path)
        assert done.returncode == 2 and not done.stdout
        (line,) = done.stderr.splitlines()
        assert f"--output {name}" in line and says in line
    assert not (tmp_path / "runs").exists() and (tmp_path / "full.csv").read_text() == "kept"
    assert (tmp_path / "pipe.csv").is_fifo()


def test_a_timeline_of_an_ending_that_nothing_has_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    done = run("timeline", str(recipe), "--layout", "dp1,mbs4", "--measure", "-o", "drawn.txt", cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    assert done.stderr.splitlines() == [
        "trimaran: drawn.txt ends in '.txt': a timeline ends in .json, .png, .svg, .pdf"
    ]


@pytest.mark.parametrize("verb", ["bench", "data"])
def test_a_folder_that_is_not_unicode_is_refused_in_a_line(tmp_path: Path, verb: str) -> None:
    recipe = tiny_recipe(tmp_path)
    done = subprocess.run(
        [TRIMARAN.encode(), verb.encode(), bytes(recipe), b"--runs", b"runs-\xff"],
        cwd=tmp_path, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert b"is not Unicode: choose another folder" in done.stderr.splitlines()[-1] and b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data", "tiny.toml", "--megatron"], b"trimaran: data: a path or text that it is given is not Unicode"),
        (["probe", "--quick", "-o"], b"trimaran: --output is not Unicode, and the cluster is called as its file"),
    ],
)
def test_a_file_that_is_not_unicode_is_refused_before_the_work(tmp_path: Path, words: list[str], says: bytes) -> None:
    tiny_recipe(tmp_path)
    command = [TRIMARAN.encode(), *map(str.encode, words), b"file-\xff"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith(says) and done.stderr.count(b"\n") == 1, done.stderr


def test_a_job_is_read_as_it_is_written_where_texts_are_not_unicode_by_default(tmp_path: Path) -> None:
    """As under LANG=en_US, which is Latin-1: the program took the job for damaged, or it could not be written."""
    code = (
        "from trimaran.protocol.job import ConvertJob\n"
        "from trimaran.study.torch_programs import run_program_on\n"
        "run_program_on(ConvertJob(source='caf\\u00e9', output='out'), 'trimaran.train.programs.convert', 'convert')"
    )
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=plain, capture_output=True, text=True, check=False, timeout=60
    )
    assert "TrimaranError: " in done.stderr and "caf" in done.stderr.splitlines()[-1], done.stderr
