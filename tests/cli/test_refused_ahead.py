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


NEOX = {
    "model_type": "gpt_neox", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
    "intermediate_size": 64, "vocab_size": 257,
}  # fmt: skip
QWEN3 = NEOX | {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 16}


@pytest.mark.parametrize("verb", [("train", "--layout", "dp1,mbs4"), ("tune",)])
@pytest.mark.parametrize(
    ("config", "says"),
    [(NEOX, "model.parallel_residual is True"), (QWEN3, "model.qk_norm is head")],
    ids=["neox", "qwen3"],
)
def test_a_family_that_the_trainer_lacks_is_refused_before_any_rank(
    tmp_path: Path, verb: tuple[str, ...], config: dict[str, object], says: str
) -> None:
    recipe = tiny_recipe(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    before, rest = recipe.read_text().split("[model]\n")
    rest = rest[rest.index("\n[") :]
    recipe.write_text(f'{before}[model]\nname = "./config.json"\n{rest}')
    done = run(verb[0], str(recipe), *verb[1:], cwd=tmp_path)
    assert done.returncode == 2 and f"{says}, and trimaran trains no such model" in done.stderr, done.stderr
    assert not list(tmp_path.glob("runs/**/*.json")) and len(done.stderr.splitlines()) == 1


MIXTURE = "model.experts is 8, and mixtures of experts are counted, not yet planned or trained: choose a dense model"
ROW = "model,seq_len,gbs,dp,tp,pp,mbs,devices,precision\nmixtral-8x7b,4096,256,8,1,1,1,8,bf16\n"
PLANNED = ("--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--stack", "megatron", "--gbs", "256")


@pytest.mark.parametrize(
    "command",
    [
        ("plan", *PLANNED),
        ("export", "--to", "megatron-lm", *PLANNED),
        ("predict", "rows.csv", "--cluster", "dgx-h100", "--stack", "megatron"),
        ("probe", "--model", "mixtral-8x7b", "-o", "machine.toml"),
        ("train", "tiny.toml", "--layout", "dp1,mbs4"),
        ("tune", "tiny.toml"),
    ],
    ids=lambda command: command[0],
)
def test_no_verb_takes_a_mixture_of_experts_for_a_dense_model(tmp_path: Path, command: tuple[str, ...]) -> None:
    recipe = tiny_recipe(tmp_path)
    before, rest = recipe.read_text().split("[model]\n")
    recipe.write_text(f'{before}[model]\nname = "mixtral-8x7b"\n{rest[rest.index("[workload]") :]}')
    (tmp_path / "rows.csv").write_text(ROW)
    done = run(*command, cwd=tmp_path)
    assert done.returncode != 0 and MIXTURE in done.stderr + done.stdout
    assert not (tmp_path / "runs").exists()
