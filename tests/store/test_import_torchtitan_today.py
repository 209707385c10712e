"""What torchtitan has logged of its model, batch and loss since late 2025 becomes rows of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from test_import_logs import LLAMA, TITAN, only, read

MESH, BATCHES, *STEPS = TITAN.splitlines(keepends=True)
INFO = "[rank0]:[titan] 2026-02-24 19:46:01,500 - root - INFO - "
# The same 8B three times: torchtitan 0.2.2's arguments, a tree with one layer, a tree with every layer.
FLAT = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024,
    "ffn_dim_multiplier": 1.3, "norm_eps": 1e-05,
}  # fmt: skip
LAYER = {
    "attention": {"n_heads": 32, "n_kv_heads": 8, "head_dim": None, "wo": {"out_features": 4096}},
    "feed_forward": {"w1": {"in_features": 4096, "out_features": 14336}},
    "moe": None,
}
TREE = {
    "dim": 4096, "n_layers": 32, "vocab_size": 128256, "tok_embeddings": {},
    "layer": {**LAYER, "feed_forward": {"hidden_dim": 14336, "w1": {}}},
}  # fmt: skip
LAYERS = {"dim": 4096, "vocab_size": 128256, "layers": [LAYER] * 32}


def built(config: Mapping[str, object], name: str = "llama3 8B ") -> str:
    """The line that a model is built, and the JSON below it, as torchrun's tee gives them."""
    below = json.dumps(config, indent=2).replace("\n", "\n[rank0]:")
    return f"{INFO}Building {name}with {below}\n"


@pytest.mark.parametrize("config", [FLAT, TREE, LAYERS], ids=["arguments", "one layer", "all layers"])
@pytest.mark.parametrize("name", ["llama3 8B ", "llama3 8B"], ids=["spaced", "as 0.2.2 prints it"])
def test_a_configuration_as_json_states_the_shape(tmp_path: Path, config: dict[str, object], name: str) -> None:
    row = only(read(tmp_path, "".join([MESH, built(config, name), BATCHES, *STEPS])))
    assert (row.layers, row.hidden, row.heads, row.kv_heads, row.vocab) == (32, 4096, 32, 8, 128256)
    assert (row.ffn_hidden, row.head_dim, row.mlp, row.experts) == (14336, None, "swiglu", None)
    assert row.step_times_s == only(read(tmp_path, TITAN, **LLAMA)).step_times_s


def test_lines_of_another_rank_amid_a_configuration_are_not_of_it(tmp_path: Path) -> None:
    mixed = built(TREE).replace('"n_layers"', '"n_layers"', 1).replace("[rank0]:  ", "[rank4]:  {\n[rank0]:  ", 3)
    assert only(read(tmp_path, "".join([MESH, mixed, BATCHES, *STEPS]))).layers == 32
    torn = built(TREE)[: len(built(TREE)) // 2] + "\n" + built(LAYERS)
    assert only(read(tmp_path, "".join([MESH, torn, BATCHES, *STEPS]))).layers == 32


def test_a_second_training_of_torchtitan_0_2_2_on_the_same_mesh_is_a_row_of_its_own(tmp_path: Path) -> None:
    job = "".join([MESH, built(FLAT, "llama3 8B"), BATCHES, *STEPS])
    first, second = read(tmp_path, job + job.replace("batch size 8", "batch size 16").replace("loss: ", "loss: 1")).rows
    assert (first.gbs, second.gbs) == (8, 16)


def test_a_dense_qwen3_is_no_mixture_and_has_its_own_widths(tmp_path: Path) -> None:
    """Its arguments list those of experts that it does not have."""
    sizes = {"dim": 1024, "n_layers": 28, "n_heads": 16, "n_kv_heads": 8, "vocab_size": 151936, "head_dim": 128}
    sizes |= {"hidden_dim": 3072}
    said = ", ".join(f"{name}={value}" for name, value in sizes.items())
    line = "{}Building qwen3 0.6B with Qwen3ModelArgs({}, moe_enabled={}, moe_args=MoEArgs(num_experts=8))\n"
    configs = [line.format(INFO, said, False), built({**sizes, "moe_enabled": False, "moe_args": {"num_experts": 8}})]
    for config in configs:
        row = only(read(tmp_path, "".join([MESH, config, BATCHES, *STEPS])))
        assert (row.hidden, row.ffn_hidden, row.head_dim, row.heads) == (1024, 3072, 128, 16)
    mixtures = [line.format(INFO, said, True), built({**LAYERS, "layers": [{**LAYER, "moe": {"num_experts": 8}}]})]
    for config in mixtures:
        (refused,) = read(tmp_path, "".join([MESH, config, BATCHES, *STEPS])).refused
        assert "num_experts is 8: the model is a mixture of experts" in refused


@pytest.mark.parametrize(
    ("micro", "step", "mbs", "gbs"),
    [(4096, 16384, 2, 8), (4096, -1, 2, 8), (2048, 65536, 1, 32), (512, 16384, None, 8)],
)
def test_a_batch_in_tokens_is_one_of_sequences(
    tmp_path: Path, micro: int, step: int, mbs: int | None, gbs: int
) -> None:
    """As torchtitan has said it since August 2026."""
    line = (
        f"{INFO}Trainer is initialized with tokens/microbatch/dp-rank {micro}, tokens/train-step {step}, "
        "gradient accumulation steps 1, sequence length 2048, total steps 3 (warmup 2)\n"
    )
    found = read(tmp_path, "".join([MESH, line, *STEPS]), **LLAMA)
    if mbs is None:
        assert "mbs is not stated" in found.refused[0]
        return
    row = only(found)
    assert (row.mbs, row.gbs, row.seq_len) == (mbs, gbs, 2048)
    assert row.step_times_s == pytest.approx([gbs * 2048 / 8 / tps for tps in (500, 2048, 2000)])


def test_a_loss_of_ranks_without_the_last_stage_is_none(tmp_path: Path) -> None:
    """They print -1 where it stands, and may write before the rank that has one."""
    first, last = "\n".join(STEPS[0].splitlines()), STEPS[1]
    without = [line.replace("loss: 12.2721", "loss: -1.0000") for line in (first + "\n", last)]
    steps = "".join([without[0], last, *STEPS[2:]])
    assert only(read(tmp_path, MESH + BATCHES + steps, **LLAMA)).losses == (12.2721, 9.62585, 7.62585)
    alone = only(read(tmp_path, MESH + BATCHES + without[0] + "".join(STEPS[2:]), **LLAMA))
    assert alone.losses == (9.62585, 7.62585) and len(alone.step_times_s or ()) == 3


def test_what_fails_behind_the_last_step_that_was_asked_for_leaves_the_run_as_good_as_any(tmp_path: Path) -> None:
    end = "Traceback (most recent call last)\nRuntimeError: destroyed twice\n"
    row = only(read(tmp_path, TITAN + end, **LLAMA))
    assert row.status == "ok" and "all 3 iterations were done" in (row.notes or "")
    assert only(read(tmp_path, TITAN.replace("total steps 3", "total steps 9") + end, **LLAMA)).status == "fail"
