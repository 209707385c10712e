"""Lines as trainers print them today, where their releases of years before printed others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from test_import_forms import HEADER, only, read
from test_import_logs import read as read_bare
from test_import_trainings import megatron

NANOTRON = "[INFO|DP=0|PP=0|TP=0|node]: "
END = "Traceback (most recent call last)\nRuntimeError: destroyed twice\n"


def nanotron(number: int, seconds: float) -> str:
    return (
        f"{NANOTRON}iteration: {number} / 30 | consumed_tokens: 524K | time_per_iteration_ms: {seconds}K | "
        "tokens_per_sec: 260K | tokens_per_sec_per_gpu: 32.5K | global_batch_size: 524K | grad_norm: 1.2 | "
        f"lm_loss: 9.{number} | lr: 1e-05 | model_tflops_per_gpu: 200 | eta: 0:00:10\n"
    )


def test_nanotron_of_late_2025_says_its_batch_below_the_words_of_its_start(tmp_path: Path) -> None:
    """Its batch was not stated, as each line of a step has it in tokens."""
    start = (
        f"{NANOTRON}Start training\n{NANOTRON}mbs: 4 | grad_accum: 8 | cp: 2 | sequence_length: 1024 | "
        "global_batch_size: 512 | train_steps: 30 | start_iteration_step: 0 | consumed_tokens_total: 0\n"
    )
    given = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257}
    (row,) = read_bare(tmp_path, start + nanotron(1, 9.0) + nanotron(2, 2.0), **given).rows
    assert (row.gbs, row.mbs, row.seq_len, row.cp, row.cp_kind) == (512, 4, 1024, 2, "all_gather")


def test_nanotron_of_2025_names_its_time_otherwise_and_its_batch_in_tokens(tmp_path: Path) -> None:
    """No line of it was recognised, and under a printed configuration half a million sequences were the batch."""
    start = (
        f"{NANOTRON}[Start training] datetime: 2025-10-17 16:31:56.889276 | mbs: 4 | grad_accum: 8 | "
        "global_batch_size: 512 | sequence_length: 1024 | train_steps: 30 | start_iteration_step: 0\n"
        f"{NANOTRON} Memory usage: 900.00MiB. Peak allocated 10240.00MiB. Peak reserved: 20480.00MiB\n"
    )
    steps = nanotron(1, 9.0) + nanotron(10, 2.0) + nanotron(20, 2.02)
    given = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257}
    found = read_bare(tmp_path, start + steps, **given)
    (row,) = found.rows
    assert (found.format, row.gbs, row.mbs, row.seq_len, row.mem_gib) == ("nanotron", 512, 4, 1024, 20.0)
    assert row.step_times_s == (9.0, 2.0, 2.02) and "mean of" not in (row.notes or ""), "each of its iteration alone"
    assert "gbs is not stated" in read_bare(tmp_path, steps, **given, mbs=4, seq_len=1024).refused[0]


def test_steps_of_olmo_core_that_are_not_counted_to_an_end_are_steps(tmp_path: Path) -> None:
    """Where tokens say how far a training goes."""
    step = "2025-01-01 10:00:0{0}.123 host olmo_core.train INFO [step={0}/???,epoch=1]\n    train/CE loss=9.{0}\n"
    text = "".join(step.format(number) + "    throughput/device/BPS=0.5\n" for number in (1, 2, 3))
    row = only(read(tmp_path, text), "olmo-core")
    assert (row.step_times_s, row.losses) == ((2.0, 2.0, 2.0), (9.1, 9.2, 9.3))


@pytest.mark.parametrize(
    ("form", "last", "steps"),
    [
        ("nanotron", 30, nanotron(30, 2.0)),
        ("olmo-core", 30, "olmo_core.train INFO [step=30/30,epoch=1]\n    throughput/device/BPS=0.5\n"),
        ("hugging-face", 30, HEADER.format(30) + " 100%|#| 30/30 [01:00<00:00, 2.0s/it]\n{'loss': 9.1}\n"),
        ("nemo", 29, "Training epoch 0, iteration 29/29 | global_batch_size: 64 | global_step: 29 | "
                 "reduced_train_loss: 9.1 | train_step_timing in s: 2.0\n"),
    ],
)  # fmt: skip
def test_what_fails_when_all_steps_were_done_leaves_a_run_as_good_as_any(
    tmp_path: Path, form: str, last: int, steps: str
) -> None:
    """It was left out of fits."""
    row = only(read(tmp_path, steps + END), form)
    assert row.status == "ok" and "iterations were done before the log tells of an end by fail" in (row.notes or "")
    for said in ("iteration: {}", "step={}/", " {}/", "global_step: {}"):
        steps = steps.replace(said.format(last), said.format(last - 1))
    assert only(read(tmp_path, steps + END), form).status == "fail"


def test_a_time_is_said_to_be_a_mean_where_the_first_iteration_is_logged_beside(tmp_path: Path) -> None:
    """Megatron-LM since January 2026 and torchtitan log it, whatever the interval."""
    line = " iteration {0}/ 100 | elapsed time per iteration (ms): 2000.0 | global batch size: 64 | lm loss: {0}.5 |\n"

    def noted(*numbers: int) -> str:
        (row,) = read(tmp_path, "".join(line.format(number) for number in numbers)).rows
        return row.notes or ""

    assert "each time is the mean of 10 iterations" in noted(1, 10, 20, 30)
    assert "each time is the mean of 10 iterations" in noted(1, 10, 20, 30, 40, 50, 31, 40, 50, 60)
    assert "mean of 9 iterations" in noted(1, 10)
    assert "mean of" not in noted(1, 2, 3) and "mean of" not in noted(1, 10, 11, 30)


def test_an_iteration_that_two_ranks_of_megatron_print_is_one(tmp_path: Path) -> None:
    line = " iteration {0}/ 9 | elapsed time per iteration (ms): {1} | global batch size: 64 | lm loss: {0}.5 |\n"
    (row,) = read(tmp_path, "".join(line.format(*each) for each in ((1, 9000), (1, 9001), (2, 2000), (2, 2001)))).rows
    assert row.step_times_s == (9.0, 2.0)


@pytest.mark.parametrize(
    ("begun", "rate", "stack"),
    [
        (" ", "", "megatron"),
        (" [2025-10-02 22:52:07] ", "", "megatron-core"),
        (
            "[20251202 09:12:08][rank-7/8][INFO ] : ",
            " throughput per GPU (TFLOP/s/GPU): 567.6/568.0 |",
            "megatron-core",
        ),
        (" ", " TFLOPs: 96.1 |", "megatron-deepspeed"),
    ],
)
def test_a_log_of_megatron_without_its_arguments_is_of_the_software_that_prints_such_lines(
    tmp_path: Path, begun: str, rate: str, stack: str
) -> None:
    """Those of Megatron-Bridge and Primus were predicted as Megatron of 2021."""
    unit, seconds = ("s", 2.0) if "deepspeed" in stack else ("ms", 2000.0)
    line = (
        f"{begun}iteration {{0}}/ 9 | elapsed time per iteration ({unit}): {seconds} |{rate} global batch size: 64 | "
        "lm loss: {0}.5 |\n"
    )
    (row,) = read(tmp_path, line.format(1) + line.format(2) + line.format(3)).rows
    assert (row.stack, row.sec_per_it) == (stack, 2.0)


@pytest.mark.parametrize(
    ("arguments", "stack"),
    [
        ({"cuda_graph_impl": "none", "cuda_graph_scope": "full"}, "megatron-core"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, "megatron-core-graphs"),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "[]"}, "megatron-core-graphs"),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "['attn', 'mlp']"}, "megatron-core-graphs"),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "['attn']"}, "megatron-core"),
        ({"external_cuda_graph": "True"}, "megatron-core-graphs"),
    ],
)
def test_layers_that_megatron_replays_as_graphs_are_of_the_stack_that_does(
    tmp_path: Path, arguments: dict[str, str], stack: str
) -> None:
    text = megatron(context_parallel_size="1", **arguments)
    assert {row.stack for row in read_bare(tmp_path, text).rows} == {stack}


def test_a_trainer_of_transformers_5_that_goes_on_made_the_steps_behind_its_checkpoint_alone(tmp_path: Path) -> None:
    """It says so in other words."""
    resumed = HEADER.format(1000) + "  Resuming training from checkpoint with epoch 3 and global step 900\n"
    row = only(read(tmp_path, resumed + "{'train_runtime': '1000', 'train_steps_per_second': '1'}\n"), "hugging-face")
    assert row.sec_per_it == 10.0 and "the mean over 100 steps" in (row.notes or "")


def state(begun: int, *, earlier: float | None = None, of: int = 1000) -> str:
    """A `trainer_state.json` of so many steps, whose last job began at one, as transformers' Trainer keeps it."""
    losses = {step: round(10.0 - step / 200, 4) for step in range(10, of + 1, 10)}
    history: list[dict[str, float]] = [{"step": step, "loss": loss, "epoch": 1.0} for step, loss in losses.items()]
    if earlier is not None:
        history.insert(begun // 10, {"step": begun, "train_runtime": earlier, "train_loss": 9.0})
    made = sum(10 * loss for step, loss in losses.items() if step > begun)
    history.append({"step": of, "train_runtime": 2.0 * (of - begun), "train_loss": made / of})
    return json.dumps({"train_batch_size": 4, "global_step": of, "log_history": history}, indent=1)


@pytest.mark.parametrize(("begun", "earlier"), [(0, None), (700, None), (500, 7000.0)])
def test_the_time_of_a_trainers_state_is_over_the_steps_of_its_last_job(
    tmp_path: Path, begun: int, earlier: float | None
) -> None:
    """Of one that went on from a checkpoint it was that job's seconds over the steps of all jobs."""
    row = only(read(tmp_path, state(begun, earlier=earlier)), "hugging-face")
    assert row.sec_per_it == pytest.approx(2.0, rel=0.01) and f"the mean over {1000 - begun} steps" in (row.notes or "")
